"""Send the cases of a directory through KServe's client: `kserve_client.py HOST:PORT DIRECTORY`."""

import asyncio
import sys

import httpx
import numpy as np
from case_files import run
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

NUMPY = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "BOOL": bool, "INT32": np.int32, "INT64": np.int64}


def request_of(case, tensors):
    """Return the request of a case. If an input is BF16, which KServe's client lacks, all tensors are JSON numbers."""
    inputs, binary = [], case["binary"] and all(i["datatype"] in NUMPY for i in case["inputs"].values())
    for name, given in case["inputs"].items():
        array, datatype = tensors[given["tensor"]], given["datatype"]
        if binary:
            inputs.append(InferInput(name, list(array.shape), datatype))
            inputs[-1].set_data_from_numpy(array.astype(NUMPY[datatype]), binary_data=True)
        else:
            inputs.append(InferInput(name, list(array.shape), datatype, data=array.flatten().tolist()))
    outputs = case["outputs"] and [RequestedOutput(name, {"binary_data": binary}) for name in case["outputs"]]
    parameters = {**case["parameters"], **case["arguments"]}
    if binary and not outputs:
        parameters["binary_data_output"] = True
    return InferRequest(
        case["model"], inputs, request_id=case["name"], parameters=parameters, request_outputs=outputs or None
    )


async def ask(url, cases, tensors, answers):
    report, base = {}, f"http://{url}"
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        report["ready"] = [
            await client.is_server_live(base),
            await client.is_server_ready(base),
            await client.is_model_ready(base, "attention"),
        ]
        for case in cases:
            try:
                answer = await client.infer(base, request_of(case, tensors), model_name=case["model"])
            except httpx.HTTPStatusError as error:
                report[case["name"]] = [str(error.response.status_code), str(error)]
                continue
            for output in answer.outputs:
                actual = np.array(output.data, np.float64) if output.datatype == "BF16" else output.as_numpy()
                answers[f"{case['name']}/{output.name}"] = actual.astype(np.float64).reshape(output.shape)
            report[case["name"]] = answer.id
    return report


run(lambda *given: asyncio.run(ask(*given)), *sys.argv[1:])
