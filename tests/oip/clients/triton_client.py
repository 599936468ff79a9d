"""Send the cases of a directory through NVIDIA's tritonclient: `triton_client.py sync|asyncio HOST:PORT DIRECTORY`."""

import asyncio
import sys

import numpy as np
import tritonclient.http
import tritonclient.http.aio
from case_files import readiness, run
from tritonclient.http import InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException, triton_to_np_dtype


def request_of(case, tensors):
    """Return the keyword arguments of tritonclient's `infer` for a case."""
    inputs = []
    for name, given in case["inputs"].items():
        array = tensors[given["tensor"]].astype(triton_to_np_dtype(given["datatype"]))
        inputs.append(InferInput(name, list(array.shape), given["datatype"]))
        inputs[-1].set_data_from_numpy(array, binary_data=case["binary"])
    outputs = case["outputs"] and [InferRequestedOutput(name, binary_data=case["binary"]) for name in case["outputs"]]
    return {
        "model_name": case["model"],
        "inputs": inputs,
        "outputs": outputs,
        "parameters": case["parameters"],
        "request_id": case["name"],
        **case["arguments"],
    }


def told(answer, answers, case):
    document = answer.get_response()
    for output in document["outputs"]:
        answers[f"{case['name']}/{output['name']}"] = answer.as_numpy(output["name"]).astype(np.float64)
    return document["id"]


def sync(url, cases, tensors, answers):
    report = {}
    with tritonclient.http.InferenceServerClient(url) as client:
        report["ready"] = [client.is_server_live(), client.is_server_ready(), client.is_model_ready("attention")]
        report["metadata"] = client.get_model_metadata("attention")["name"]
        report["extensions"] = client.get_server_metadata()["extensions"]
        for case in cases:
            try:
                report[case["name"]] = told(client.infer(**request_of(case, tensors)), answers, case)
            except InferenceServerException as error:
                report[case["name"]] = [error.status(), error.message()]
        report["config"] = client.get_model_config("attention_grad")["name"]
        report["stats"] = client.get_inference_statistics()
        report["index"] = [model["name"] for model in client.get_model_repository_index()]
        pending = [client.async_infer(**request_of(cases[0], tensors)) for _ in range(4)]
        report["async_infer"] = [told(one.get_result(), answers, cases[0]) for one in pending]
    return report


async def aio(url, cases, tensors, answers):
    report = {}
    async with tritonclient.http.aio.InferenceServerClient(url) as client:
        report["ready"] = await readiness(client)
        report["metadata"] = (await client.get_model_metadata("attention"))["name"]
        report["extensions"] = (await client.get_server_metadata())["extensions"]
        for case in cases:
            try:
                report[case["name"]] = told(await client.infer(**request_of(case, tensors)), answers, case)
            except InferenceServerException as error:
                report[case["name"]] = [error.status(), error.message()]
        report["config"] = (await client.get_model_config("attention_grad"))["name"]
        report["stats"] = await client.get_inference_statistics()
        report["index"] = [model["name"] for model in await client.get_model_repository_index()]
        many = await asyncio.gather(*(client.infer(**request_of(cases[0], tensors)) for _ in range(4)))
        report["async_infer"] = [told(one, answers, cases[0]) for one in many]
    return report


def main(kind, url, directory):
    run(sync if kind == "sync" else lambda *given: asyncio.run(aio(*given)), url, directory)


main(*sys.argv[1:])
