"""Keys, units as files, rows and what is kept within a budget."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gfdit.templates.budget import plan_budget
from gfdit.templates.keys import TemplateKey, UnitKey
from gfdit.templates.rows import gather, scales_of
from gfdit.templates.units import Unit, map_unit, pack, prepare, write_all
from tests.templates.helpers import template, values_of

PARTS = {
    "image": b"pixels", "model": ("qwen", "abc"), "size": (64, 64), "sigmas": [1.0, 0.5], "prompts": ["a", "b"],
    "guidance": 4.0, "noise": 7, "lora": None, "quantisation": None, "dtype": "bfloat16",
}  # fmt: skip
OTHERS = {
    "image": b"pixelt", "model": ("qwen", "abd"), "size": (64, 65), "sigmas": [1.0, 0.25], "prompts": ["ab", ""],
    "guidance": 4.5, "noise": "7", "lora": {"x": 1.0}, "quantisation": "fp8", "dtype": "float32",
}  # fmt: skip


def test_equal_parts_give_equal_keys() -> None:
    again = {**PARTS, "guidance": 4, "size": [64, 64], "sigmas": (1, 0.5)}
    key = TemplateKey.of(**PARTS)
    assert key == TemplateKey.of(**dict(reversed(again.items()))) == TemplateKey(str(key))
    array = np.arange(4, dtype=np.float32)
    as_array, as_tensor = ({**PARTS, "image": image} for image in (array, torch.from_numpy(array)))
    assert TemplateKey.of(**as_array) == TemplateKey.of(**as_tensor)


@pytest.mark.parametrize("name", PARTS)
def test_every_part_counts(name: str) -> None:
    assert TemplateKey.of(**PARTS) != TemplateKey.of(**{**PARTS, name: OTHERS[name]})


def test_a_part_of_no_known_kind_is_named() -> None:
    with pytest.raises(TypeError, match=r"template\.options\.dtype is a object"):
        TemplateKey.of(**{**PARTS, "dtype": object()})
    with pytest.raises(ValueError, match=r"64 hexadecimal digits, not by '\.\./x'"):
        TemplateKey("../x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (3, 2, 5, 7)])
def test_a_file_gives_back_what_was_put(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).to(dtype)
    unit = _through_a_file(tmp_path, Unit(values))
    assert unit.scales is None and unit.values.dtype == dtype
    assert torch.equal(unit.values.float(), values.float())


def test_rounded_values_are_near(tmp_path: Path) -> None:
    values = torch.randn(3, 2, 50, 7) * torch.tensor([1e-3, 1.0, 1e4])[:, None, None, None]
    values[1, 1] = 0
    unit = _through_a_file(tmp_path, prepare(values.bfloat16(), "fp8"))
    exact = unit.exact(torch.float32)
    # e4m3 has three bits behind the point, so it is off by 1/16 at most where it is normal; bfloat16 by 1/256.
    largest = values.abs().amax(dim=(2, 3), keepdim=True)
    assert torch.all((exact - values).abs() <= values.abs() * 0.07 + largest * 1e-4)
    assert torch.equal(exact[1, 1], torch.zeros(50, 7))


@pytest.mark.parametrize(
    ("values", "precision", "told"),
    [
        (torch.zeros(1, 2, 3), "as is", r"\(1, 2, 3\)"),
        (torch.zeros(1, 3, 3, 3), "as is", "not"),
        (torch.zeros(1, 2, 3, 3, dtype=torch.int8), "as is", "int8"),
        (torch.full((1, 2, 3, 3), torch.inf), "fp8", "not finite"),
        (torch.zeros(1, 2, 3, 3), "fp4", "'fp4'"),
    ],
)
def test_what_cannot_be_kept_is_told(values: torch.Tensor, precision: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        prepare(values, precision)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 5), max_size=9), st.integers(1, 3), st.booleans(), st.booleans())
def test_gathered_rows_are_those_asked_for(rows: list[int], heads: int, rounded: bool, one_block: bool) -> None:
    key = template("rows")
    units = [prepare(values_of(UnitKey(key, 0, 0, h)), "fp8" if rounded else "as is") for h in range(heads)]
    blocks = range(1, 2) if one_block else None
    got = gather(units, torch.tensor(rows, dtype=torch.int64), blocks=blocks).float()
    if (scales := scales_of(units)) is not None:
        got = got * (scales[1:2] if one_block else scales)
    for head, unit in enumerate(units):
        expected = unit.exact(torch.float32)[1:2] if one_block else unit.exact(torch.float32)
        assert torch.equal(got[:, head], expected[:, :, rows])


def test_rows_go_into_a_buffer() -> None:
    unit, rows = Unit(torch.randn(2, 2, 6, 8)), torch.tensor([5, 1])
    out = torch.empty(2, 1, 2, 2, 8)
    assert gather([unit], rows, out=out) is out
    assert torch.equal(out[1, 0, 0], unit.values[1, 0, rows])


@given(st.integers(1, 60), st.integers(1, 100), st.integers(0, 9000), st.booleans())
def test_a_plan_uses_its_budget(num_steps: int, fp8_bytes: int, budget: int, may_round: bool) -> None:
    plan = plan_budget(num_steps, 2 * fp8_bytes, fp8_bytes, budget, may_round=may_round)
    assert list(plan) == list(range(len(plan))), "the last steps are those left out"
    size = {"as is": 2 * fp8_bytes, "fp8": fp8_bytes}
    taken = sum(size[precision] for precision in plan.values())
    assert taken <= budget and len(set(plan.values())) <= 1
    if 2 * fp8_bytes * num_steps <= budget:
        assert plan == dict.fromkeys(range(num_steps), "as is")
    elif len(plan) < num_steps:
        assert budget - taken < (fp8_bytes if may_round else 2 * fp8_bytes)


def test_a_plan_for_flux() -> None:
    """57 blocks, 4096 tokens, 24 heads of 128: 75 GiB of 28 steps at 1024 x 1024."""
    num_values = 24 * 57 * 2 * 4096 * 128
    as_is, fp8 = 2 * num_values, num_values
    assert 74 < 28 * as_is / 2**30 < 76
    assert set(plan_budget(28, as_is, fp8, 40 << 30).values()) == {"fp8"}
    assert len(plan_budget(28, as_is, fp8, 20 << 30)) == 14
    with pytest.raises(ValueError, match="num_steps must be at least 1, not 0"):
        plan_budget(0, as_is, fp8, 1)


def _through_a_file(tmp_path: Path, unit: Unit) -> Unit:
    key = UnitKey(template("file"), 1, 0, 3)
    with (tmp_path / "unit").open("w+b", buffering=0) as file:
        write_all(file.fileno(), pack(key, unit))
        return map_unit(file.fileno(), key, check=True)
