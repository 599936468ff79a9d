# Flashpoint in a container (docs/docker.md):
#   docker build -t flashpoint . && docker run --gpus all -p 127.0.0.1:8000:8000 flashpoint
#   docker build -t flashpoint:cpu --build-arg DEVICE=cpu . && docker run -p 127.0.0.1:8000:8000 flashpoint:cpu
ARG DEVICE=gpu

# The driver must be new enough for CUDA 13 (580 or later). `base` has no CUDA libraries but the runtime's own: torch of
# the release that constraints.txt names, from pip's own index, brings all that it was built with, and Triton its tools.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS base-gpu
ENV DEVICE_TORCH_INDEX=""
# Kernels are compiled for these architectures while the image is built.
ENV ARCHITECTURES="80 86 89 90 100"
# Triton compiles its driver module with gcc against Python's headers when a kernel first runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM debian:12.12-slim AS base-cpu
# Torch's own index has builds for the CPU alone, without CUDA's libraries.
ENV DEVICE_TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV ARCHITECTURES=""
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM base-${DEVICE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /opt/flashpoint
# For the CPU kernels, which are compiled with the package. The service's image does not need it for them.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# torch first, in a layer of its own: it is gigabytes, and changes seldom.
COPY constraints.txt ./
# Another index for torch, for example that of a mirror; empty is pip's own.
ARG TORCH_INDEX
RUN python3 -m venv venv \
    && index="${TORCH_INDEX-$DEVICE_TORCH_INDEX}" \
    && venv/bin/pip install -c constraints.txt ${index:+--index-url "$index"} torch \
    && venv/bin/pip install -c constraints.txt numpy triton
# Kernels are compiled from the sources that they depend on, before others are copied: a change of the server compiles none.
COPY contract contract
COPY kernels kernels
# A kernel needs its code and its description to run; the other files that Triton keeps are removed.
# hadolint ignore=SC2086
RUN mkdir compiled \
    && if [ -n "$ARCHITECTURES" ]; then \
        PYTHONPATH=contract:kernels TRITON_CACHE_DIR=/opt/flashpoint/compiled \
        venv/bin/python -m flashpoint_kernels.triton_backend.tools.ahead --arch $ARCHITECTURES; \
    fi \
    && find compiled -type f ! -name "*.cubin" ! -name "*.json" -delete
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY client client
COPY server server
RUN venv/bin/pip install -c constraints.txt ".[grpc,otel,server]"

FROM base-${DEVICE} AS service
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Flashpoint" \
      org.opencontainers.image.description="Flash attention as an endpoint" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="$REVISION"
RUN useradd --create-home --uid 10001 flashpoint \
    && install --directory --owner 10001 /var/cache/triton
COPY --from=build /opt/flashpoint/venv /opt/flashpoint/venv
COPY --from=build /opt/flashpoint/compiled /opt/flashpoint/compiled
COPY deploy/docker/entrypoint.sh /usr/local/bin/flashpoint-entrypoint
ENV PATH=/opt/flashpoint/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TRITON_CACHE_DIR=/var/cache/triton \
    FLASHPOINT_HOST=0.0.0.0 \
    FLASHPOINT_PORT=8000 \
    FLASHPOINT_INSECURE=true
USER 10001
WORKDIR /home/flashpoint
EXPOSE 8000
# Reads the same variables as the service: port, host, TLS.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["flashpoint", "health"]
ENTRYPOINT ["flashpoint-entrypoint"]
CMD ["flashpoint", "serve"]
