"""Request attention and gradients in shared memory, and print a report: `triton_shared_memory.py HOST:PORT`."""

import json
import os
import sys

import numpy as np
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

SHAPE, NAMES = (2, 3, 40, 32), ("q", "k", "v", "do")
NBYTES = 4 * int(np.prod(SHAPE))
INPUTS, OUTPUTS = (f"/flashpoint_{name}_{os.getpid()}" for name in ("inputs", "outputs"))


def truth(q, k, v, do):
    s = q @ k.swapaxes(-1, -2) / SHAPE[-1] ** 0.5
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    ds = p * (do @ v.swapaxes(-1, -2) - (do * (p @ v)).sum(-1, keepdims=True))
    return p @ v, ds @ k / SHAPE[-1] ** 0.5


def worst(actual, expected):
    return float(abs(actual - expected).max() / abs(expected).max())


def main(url):
    tensors = np.random.default_rng(0).standard_normal((4, *SHAPE)).astype(np.float32)
    report = {"input_size": 4 * NBYTES, "output_size": 2 * NBYTES}
    given = shm.create_shared_memory_region("inputs", INPUTS, 4 * NBYTES)
    made = shm.create_shared_memory_region("outputs", OUTPUTS, 2 * NBYTES)
    try:
        shm.set_shared_memory_region(given, list(tensors))
        with triton.InferenceServerClient(url) as client:
            report["extension"] = "system_shared_memory" in client.get_server_metadata()["extensions"]
            client.register_system_shared_memory("inputs", INPUTS, 4 * NBYTES)
            client.register_system_shared_memory("outputs", OUTPUTS, 2 * NBYTES)
            report["registered"] = client.get_system_shared_memory_status()

            def ask(model, count, output, at):
                inputs = [triton.InferInput(name, SHAPE, "FP32") for name in NAMES[:count]]
                for i, one in enumerate(inputs):
                    one.set_shared_memory("inputs", NBYTES, i * NBYTES)
                wanted = triton.InferRequestedOutput(output)
                wanted.set_shared_memory("outputs", NBYTES, at)
                answer = client.infer(model, inputs, outputs=[wanted])
                assert answer.get_output(output)["parameters"]["shared_memory_region"] == "outputs"
                return shm.get_contents_as_numpy(made, np.float32, SHAPE, at).copy()

            o, dq = truth(*tensors.astype(float))
            report["error"] = worst(ask("attention", 3, "o", 0), o)
            report["gradient_error"] = worst(ask("attention_grad", 4, "dq", NBYTES), dq)
            client.unregister_system_shared_memory("outputs")
            try:
                ask("attention", 3, "o", 0)
            except InferenceServerException as error:
                report["refused"] = error.message()
            client.unregister_system_shared_memory()
            report["unregistered"] = client.get_system_shared_memory_status()
    finally:
        shm.destroy_shared_memory_region(given)
        shm.destroy_shared_memory_region(made)
    print(json.dumps(report))


main(*sys.argv[1:])
