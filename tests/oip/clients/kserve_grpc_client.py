"""Send the cases of a directory through KServe's gRPC client: `kserve_grpc_client.py ADDRESS DIRECTORY`."""

import asyncio
import sys

import grpc
import numpy as np
from case_files import readiness, run
from kserve import InferenceGRPCClient, InferInput, InferRequest
from kserve.protocol.infer_type import RequestedOutput

NUMPY = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "BOOL": bool, "INT32": np.int32, "INT64": np.int64}


def request_of(case, tensors):
    inputs = []
    for name, given in case["inputs"].items():
        array = tensors[given["tensor"]]
        inputs.append(InferInput(name, list(array.shape), given["datatype"]))
        inputs[-1].set_data_from_numpy(array.astype(NUMPY[given["datatype"]]))
    outputs = [RequestedOutput(name, {"binary_data": True}) for name in case["outputs"]]
    parameters = {**case["parameters"], **case["arguments"]}
    return InferRequest(
        case["model"], inputs, request_id=case["name"], parameters=parameters, request_outputs=outputs or None
    )


async def ask(url, cases, tensors, answers):
    report = {}
    async with InferenceGRPCClient(url) as client:
        report["ready"] = await readiness(client)
        for case in cases:
            try:
                answer = await client.infer(request_of(case, tensors))
            except grpc.RpcError as error:
                report[case["name"]] = [error.code().name, error.details()]
                continue
            for output in answer.outputs:
                answers[f"{case['name']}/{output.name}"] = output.as_numpy().astype(np.float64).reshape(output.shape)
            report[case["name"]] = answer.id
    return report


run(lambda *given: asyncio.run(ask(*given)), *sys.argv[1:])
