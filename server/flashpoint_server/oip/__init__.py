"""The Open Inference Protocol (KServe v2, with the extensions of NVIDIA's Triton server) over HTTP.

It is another interface to /attention and /attention/grad. A JSON head names tensors and parameters and comes before the
tensors' bytes, like the head of safetensors. It is parsed into the same shapes and options; from there on, the request
is handled like one of /attention or /attention/grad.

    infer.py, head.py, answers.py   inference: its route, a request's JSON, an answer's JSON and parts
    message.py                      a message of inference, by HTTP or gRPC
    inflated.py                     compressed bodies
    models.py, datatypes.py         the models and their descriptions
    routes.py                       the routes other than inference, and errors in the protocol's format
    schema.py                       the description of inference in OpenAPI
    statistics.py                   counts in Triton's format
    memory_routes.py                tensors in shared memory of callers (ipc/regions.py)
    grpc/                           the same over gRPC
"""
