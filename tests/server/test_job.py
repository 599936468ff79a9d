"""What a job tells of itself before it runs."""

import pytest

from flashpoint_kernels.spec import Options, TensorInfo, plan
from flashpoint_server.job import CALL_SECONDS, AttentionJob, Timings
from flashpoint_server.memory import Pool
from flashpoint_server.staging import Staging


@pytest.mark.parametrize(
    ("backend", "shape", "calls"),
    [("torch", (4096, 2, 4, 16), 1), ("torch", (4096, 2, 4, 8), 4096), ("tiled", (4096, 2, 4, 16), 4096)],
)
def test_its_time_is_its_work_and_its_calls_which_sequences_may_share(backend, shape, calls):
    info = TensorInfo("float32", shape)
    spec = plan(dict.fromkeys("qkv", info), Options(), "forward")
    pool = Pool(64 << 20)
    staging = Staging.take(pool, [(name, info) for name in "qkv"], spec.outputs)
    job = AttentionJob(id="one", spec=spec, backend=backend, staging=staging, timings=Timings(0.0))
    assert job.seconds(1e9) == pytest.approx(job.flops / 1e9 + calls * CALL_SECONDS)
    staging.release()
    pool.close()
