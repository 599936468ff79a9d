"""The Open Inference Protocol (KServe v2, as NVIDIA's Triton server extends it) over HTTP: a skin of the two calls.

A JSON head names tensors and parameters, and comes before their bytes, as safetensors' head does: it is read into the
same shapes and options, and from there on a request is one of /attention's or /attention/grad's.

    infer.py, head.py, answers.py   inference: its route, a request's JSON, an answer's JSON and parts
    inflated.py                     bodies that come compressed
    models.py, datatypes.py         which models there are, and what describes them
    routes.py, schema.py            all that is not inference, and errors; inference in OpenAPI
    statistics.py                   what was served, as Triton counts it
    memory_routes.py                tensors in callers' own shared memory (ipc/regions.py)
    grpc/                           the same in protobuf's framing
"""
