"""What a worker holds: loaded once for all that name it, freed, loaded again, and refused with one line."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gfdit.adapters.testing.component_ranks import ComponentRanks
from gfdit.adapters.testing.processes import ChildError
from gfdit.workflow import Patch
from tests.adapters.components.generation import Asked, Generation, Made, Parts, generate
from tests.adapters.components.test_images import asked

Source = Callable[..., str]
Ranks = Callable[[int], ComponentRanks]


def test_unloaded_and_loaded_again(ranks: Ranks, source: Source) -> None:
    what = asked(source, "sd3 net lora@1")
    before, freed, after = ranks(1).call(generate_around_an_unload, what)
    assert freed, "the transformer is still in memory"
    assert after.difference(before) == 0


def generate_around_an_unload(rank: Any, what: Asked) -> tuple[Made, bool, Made]:
    before = generate(rank, what)
    host = rank.host
    alive = []
    for model in Parts.of(what):
        if model.component in host.resident and model.part in ("transformer", "controlnet"):
            loaded = host.components(model)
            module = getattr(loaded, "net", None) or loaded.pipeline.transformer
            alive.append(weakref.ref(module))
            del loaded, module
            host.unload(model.component)
    gc.collect()
    return before, len(alive) == 2 and not any(ref() for ref in alive), generate(rank, what)


def test_one_copy_for_all_that_name_it(ranks: Ranks, source: Source) -> None:
    """A VAE encodes and decodes; a net controls one workflow twice."""
    names, same = ranks(1).call(what_is_shared, asked(source, "flux twice"))
    assert same
    assert len(names) == len(set(names)) == 5, "text, noise, transformer, VAE and one net"


def what_is_shared(rank: Any, what: Asked) -> tuple[list[str], bool]:
    for name in list(rank.host.resident):
        rank.host.unload(name)
    one, other = Generation(rank, what), Generation(rank, what)
    host = rank.host
    pairs = [(one.parts.image, one.parts.decoder), tuple(one.parts.nets), (one.parts.base, other.parts.base)]
    return list(host.resident), all(host.components(a) is host.components(b) for a, b in pairs)


def test_bytes_are_those_of_the_weights(ranks: Ranks, source: Source) -> None:
    held, weights = ranks(1).call(bytes_held, asked(source, "flux net"))
    on_disk = (Path(source("flux")) / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size
    assert held == weights
    assert abs(held - on_disk) < 0.01 * on_disk


def bytes_held(rank: Any, what: Asked) -> tuple[int, int]:
    parts = Parts.of(what)
    held = rank.host.load(parts.base)
    transformer = rank.host.components(parts.base).pipeline.transformer
    return held, sum(tensor.nbytes for tensor in transformer.state_dict().values())


def test_another_dtype_is_another_component(ranks: Ranks, source: Source) -> None:
    names = ranks(1).call(names_in_two_dtypes, source("flux"))
    assert len(names) == 2


def names_in_two_dtypes(rank: Any, where: str) -> set[str]:
    from gfdit.adapters.components.flux import FluxDecoder

    host, names = rank.host, set()
    for dtype in ("float32", "bfloat16"):
        model = FluxDecoder(where, dtype=dtype)
        host.load(model)
        assert str(host.components(model).vae.dtype) == f"torch.{dtype}"
        names.add(model.component)
    for name in names:
        host.unload(name)
    return names


def test_what_is_not_loaded_is_named(ranks: Ranks, source: Source) -> None:
    with pytest.raises(ChildError, match=r"component vae:.* is not loaded on rank 0"):
        ranks(1).call(decode_without_loading, source("sd3", seed=3))


def decode_without_loading(rank: Any, where: str) -> None:
    from gfdit.adapters.components.sd3 import SD3Decoder
    from gfdit.adapters.testing.component_rank import Call
    from gfdit.core.layouts import ExecutionLayout

    rank.host.execute(SD3Decoder(where), Call(ExecutionLayout((0,))), {})


def test_what_cannot_be_loaded_is_said_in_a_line(ranks: Ranks, source: Source, tmp_path: Path) -> None:
    with pytest.raises(ChildError) as caught:
        ranks(1).call(load_from, str(tmp_path))
    assert f"component vae:{tmp_path}:None cannot be loaded: " in str(caught.value).splitlines()[0]


def load_from(rank: Any, where: str) -> None:
    from gfdit.adapters.components.sd3 import SD3Decoder

    try:
        rank.host.load(SD3Decoder(where))
    finally:
        assert not any(where in name for name in rank.host.resident)


def test_a_lora_that_fits_in_part_is_refused_and_leaves_nothing(ranks: Ranks, source: Source) -> None:
    """One of a deeper transformer, whose last blocks there are not."""
    what = asked(source, "sd3 lora@0")
    deeper = source("sd3-lora", seed=15, num_layers=7)
    wrong = replace(what, lora=Patch(deeper))
    with pytest.raises(ChildError) as caught:
        ranks(1).call(generate, wrong)
    told = str(caught.value).splitlines()[0]
    assert f"{deeper} fits in part only: the transformer has no layer for 12 of its 42 modules" in told
    assert ranks(1).call(generate, replace(what, lora=None)).difference(ranks(1).call(generate_fresh, what)) == 0


def generate_fresh(rank: Any, what: Asked) -> Made:
    """On a transformer that never had a LoRA."""
    rank.host.unload(Parts.of(what).base.component)
    return generate(rank, replace(what, lora=None))


def test_what_is_no_lora_is_refused(ranks: Ranks, source: Source, tmp_path: Path) -> None:
    wrong = replace(asked(source, "flux lora@0"), lora=Patch(str(tmp_path)))
    with pytest.raises(ChildError, match=f"{tmp_path} cannot be read as a LoRA"):
        ranks(1).call(generate, wrong)


def test_a_lora_is_read_while_steps_run(ranks: Ranks, source: Source) -> None:
    """Layers are wrapped with the transformer, and reading is over before the step: that only activates."""
    waited, made = ranks(1).call(generate_reading_ahead, asked(source, "sd3 lora@2"))
    assert not waited
    assert made.difference(ranks(1).call(generate, asked(source, "sd3 lora@2"))) == 0


def generate_reading_ahead(rank: Any, what: Asked) -> tuple[bool, Made]:
    import time

    base = Parts.of(what).base.component
    if base in rank.host.resident:
        rank.host.unload(base)
    run = Generation(rank, what)
    rank.host.read_patches(run.parts.base)
    for _ in range(2):
        run.step()
    while rank.host.patches_read(run.parts.base) != run.parts.base.patches:
        time.sleep(0.01)
    components = rank.host.components(run.parts.base)
    loras, layers = components.loras, list(components.pipeline.modules())
    reads, loras._read = [], lambda *args: reads.append(args)
    for _ in range(2):
        run.step()
    wrapped = list(components.pipeline.modules()) != layers
    return bool(reads) or wrapped, run.finish()
