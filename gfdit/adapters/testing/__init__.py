"""The test kit for adapters: the real worker code on a few CPU ranks, driven from a script.

Every rank is a process with the stock vLLM-Omni worker, the elastic runner, real collectives over shared memory
and the adapter's codecs, exactly as under ``gfdit serve``. The kit takes the place of API server, engine and
control process: it says which task runs where, and moves artifacts as the control plane would. References come
from the stock pipeline, in a process of its own, with vLLM-Omni's own runner.

In a test, with ``kits`` of ``tests/adapters/conftest.py`` (one fork server for the whole session)::

    def test_my_family(kits):
        kit = kits("my-family")                      # or kits(path_to_checkpoint, adapter="module:Class")
        requests = [KitRequest(128, 128), KitRequest(144, 208, negative_prompt="blurry", true_cfg_scale=4.0)]
        report = check_adapter(kit, requests)
        assert report.passed, str(report)

By hand::

    with AdapterKit(model_dir, num_ranks=4, dtype="float32", adapter=None, od_config={}) as kit:
        (stock,) = kit.stock([request])
        out = kit.run(request, "encode@3 prepare@1 sp1@1 sp2@2,0 sp4@0,1,2,3 decode@2")
        assert out.difference(stock) <= 1e-4         # or out.identical(stock)
        kit.run_interleaved([(one, "sp1@0 sp2@1,0"), (other, "sp2@0,1")])
        kit.run_batched([one, other], "sp2@0,1")     # outputs, requests per forward pass, why not more
        kit.artifact_bytes(request)

Scripts are those of ``gfdit.policies.layout_script``. From a shell, for an adapter's author::

    python -m gfdit.adapters.testing FILE.py             # models of workflows, see ``workflow_checks``
    python -m gfdit.adapters.testing MODEL_DIR --adapter my_package.my_adapter:MyAdapter --size 128x128
"""

from gfdit.adapters.testing.checks import CHECKS, Report, check_adapter
from gfdit.adapters.testing.kit import AdapterKit, Batched
from gfdit.adapters.testing.outputs import Output
from gfdit.adapters.testing.processes import ChildError, ForkServer
from gfdit.adapters.testing.requests import KitRequest

__all__ = [
    "CHECKS",
    "AdapterKit",
    "Batched",
    "ChildError",
    "ForkServer",
    "KitRequest",
    "Output",
    "Report",
    "check_adapter",
]
