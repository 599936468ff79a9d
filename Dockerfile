# Flashpoint on a GPU host:
#   docker build -t flashpoint . && docker run --gpus all -p 8000:8000 flashpoint
# The driver must be new enough for CUDA 13 (580 or later).
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# Triton compiles its driver module with gcc against Python's headers when a kernel first runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 flashpoint \
    && install --directory --owner flashpoint /opt/flashpoint /var/cache/triton
USER flashpoint
WORKDIR /opt/flashpoint

ENV PATH=/opt/flashpoint/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    TRITON_CACHE_DIR=/var/cache/triton \
    FLASHPOINT_HOST=0.0.0.0 \
    FLASHPOINT_PORT=8000

# torch first, in a layer of its own: it is gigabytes, and changes seldom. The release that constraints.txt names, which
# brings the CUDA libraries it was built with.
COPY constraints.txt ./
RUN python3 -m venv venv \
    && pip install -c constraints.txt torch triton

COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY kernels kernels
COPY server server
RUN pip install -c constraints.txt ".[server]"

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['FLASHPOINT_PORT']}/health/live\", timeout=4)"]

CMD ["flashpoint", "serve"]
