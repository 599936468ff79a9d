"""Send cases through tritonclient over gRPC: `triton_grpc_client.py sync|asyncio HOST:PORT DIRECTORY`."""

import asyncio
import queue
import sys

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
from case_files import readiness, run
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException, triton_to_np_dtype


def request_of(case, tensors):
    """Return the keyword arguments of tritonclient's `infer` for a case."""
    inputs = []
    for name, given in case["inputs"].items():
        array = tensors[given["tensor"]].astype(triton_to_np_dtype(given["datatype"]))
        inputs.append(InferInput(name, list(array.shape), given["datatype"]))
        inputs[-1].set_data_from_numpy(array)
    return {
        "model_name": case["model"],
        "inputs": inputs,
        "outputs": [InferRequestedOutput(name) for name in case["outputs"]] or None,
        "parameters": case["parameters"],
        "request_id": case["name"],
        **case["arguments"],
    }


def told(answer, answers, case):
    message = answer.get_response()
    for output in message.outputs:
        answers[f"{case['name']}/{output.name}"] = answer.as_numpy(output.name).astype(np.float64)
    return message.id


def refused(error):
    return [error.status().removeprefix("StatusCode."), error.message()]


def in_the_background(client, case, tensors):
    """Call `async_infer`; return a queue, into which its callback puts (result, error)."""
    came = queue.Queue()
    client.async_infer(callback=lambda result, error: came.put((result, error)), **request_of(case, tensors))
    return came


def sync(url, cases, tensors, answers):
    report = {}
    with tritonclient.grpc.InferenceServerClient(url) as client:
        report["ready"] = [client.is_server_live(), client.is_server_ready(), client.is_model_ready("attention")]
        report["metadata"] = client.get_model_metadata("attention", as_json=True)
        report["server"] = client.get_server_metadata(as_json=True)
        for case in cases:
            try:
                report[case["name"]] = told(client.infer(**request_of(case, tensors)), answers, case)
            except InferenceServerException as error:
                report[case["name"]] = refused(error)
        report["config"] = client.get_model_config("attention_grad", as_json=True)
        report["stats"] = client.get_inference_statistics(as_json=True)
        report["index"] = client.get_model_repository_index(as_json=True)
        pending = [in_the_background(client, cases[0], tensors) for _ in range(4)]
        results = [one.get(timeout=60) for one in pending]
        assert not any(error for _, error in results), results
        report["async_infer"] = [told(result, answers, cases[0]) for result, _ in results]
    return report


async def aio(url, cases, tensors, answers):
    report = {}
    async with tritonclient.grpc.aio.InferenceServerClient(url) as client:
        report["ready"] = await readiness(client)
        report["metadata"] = await client.get_model_metadata("attention", as_json=True)
        report["server"] = await client.get_server_metadata(as_json=True)
        for case in cases:
            try:
                report[case["name"]] = told(await client.infer(**request_of(case, tensors)), answers, case)
            except InferenceServerException as error:
                report[case["name"]] = refused(error)
        report["config"] = await client.get_model_config("attention_grad", as_json=True)
        report["stats"] = await client.get_inference_statistics(as_json=True)
        report["index"] = await client.get_model_repository_index(as_json=True)
        many = await asyncio.gather(*(client.infer(**request_of(cases[0], tensors)) for _ in range(4)))
        report["async_infer"] = [told(one, answers, cases[0]) for one in many]
    return report


def main(kind, url, directory):
    run(sync if kind == "sync" else lambda *given: asyncio.run(aio(*given)), url, directory)


main(*sys.argv[1:])
