"""The Open Inference Protocol (KServe v2, with the extensions of NVIDIA's Triton server) over HTTP.

It is another form of /attention and /attention/grad. A JSON head names tensors and parameters and comes before their
bytes, like the head of safetensors. It is parsed into the same shapes and options; from there on, the request is
handled like one of /attention or /attention/grad.

    infer.py, head.py, answers.py   inference: its route, a request's JSON, an answer's JSON and parts
    inflated.py                     compressed bodies
    models.py, datatypes.py         the models and their descriptions
    routes.py, schema.py            everything except inference, and errors; inference in OpenAPI
    statistics.py                   counts in the form of Triton
    memory_routes.py                tensors in shared memory of callers (ipc/regions.py)
    grpc/                           the same over gRPC
"""
