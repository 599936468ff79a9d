"""The Open Inference Protocol (KServe v2, as NVIDIA's Triton server extends it) over HTTP: a skin of the two calls.

A JSON head names tensors and parameters, and comes before their bytes, as safetensors' head does: it is read into the
same shapes and options, and from there on a request is one of /attention's or /attention/grad's.

    models.py      which models there are, and what describes them        routes.py   all that is not inference
    head.py        an infer request's JSON                                infer.py    inference
    answers.py     an infer answer's JSON and parts                       inflated.py bodies that come compressed
    statistics.py  what was served, as Triton counts it                   errors.py   {"error": …}
"""
