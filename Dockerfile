# SPDX-License-Identifier: Apache-2.0
# Serves Qwen2.5-Omni from NVIDIA's Triton image, with this project's pinned vLLM in an environment of its own.
#
#   docker build -t triton-omni .
#   docker run --rm --gpus all --shm-size 1g --read-only --tmpfs /tmp -v omni-cache:/cache \
#       -v /models/Qwen2.5-Omni-7B:/model:ro -p 127.0.0.1:8000:8000 -p 127.0.0.1:8001:8001 triton-omni
#
# Options of the supervisor (./build.sh serve --help) go at the end: with `triton-omni --mps`, or -e OMNI_MPS=1, it starts
# a CUDA MPS daemon in the container, whose program the container toolkit brings along with the driver.
#
# To pin the base by content, build with
#   --build-arg BASE=nvcr.io/nvidia/tritonserver@sha256:…
# where the digest is what `docker buildx imagetools inspect nvcr.io/nvidia/tritonserver:26.05-vllm-python-py3` prints.
#
# 26.05, since one HTTP header ends 26.06 and 26.07 (docs/limits.md).
ARG BASE=nvcr.io/nvidia/tritonserver:26.05-vllm-python-py3

# --- build: downloads, caches and package tools stay in this stage -----------------------------------------------------
FROM ${BASE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /opt/triton-omni
COPY requirements requirements
RUN python3 -m venv --without-pip .venv \
    && python3 -m pip install --no-cache-dir --target /opt/uv -r requirements/uv.lock
# As `build.sh setup` does it on a machine with a GPU, without the tools of checks and tests (dev.lock).
RUN /opt/uv/bin/uv pip install --no-cache --python .venv/bin/python --override requirements/overrides.txt \
        -r requirements/gpu.lock
COPY LICENSE pyproject.toml ./
COPY backend_src backend_src
COPY client client
COPY gateway gateway
RUN /opt/uv/bin/uv pip install --no-cache --python .venv/bin/python --no-deps --no-build-isolation \
        . ./client ./gateway

# --- final -------------------------------------------------------------------------------------------------------------
FROM ${BASE}
RUN groupadd --gid 10001 omni && useradd --uid 10001 --gid omni --no-create-home --shell /usr/sbin/nologin omni \
    && install -d -o omni -g omni /cache
COPY --from=build /opt/triton-omni/.venv /opt/triton-omni/.venv
COPY LICENSE /opt/triton-omni/LICENSE
COPY model_repository /opt/triton-omni/model_repository

# Everything that is written lies on /cache (kernels that vLLM compiles, fetched checkpoints) and /tmp, so the root
# file system may be read-only. The stages take their packages from the first python3 on PATH.
ENV PATH=/opt/triton-omni/.venv/bin:/opt/tritonserver/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    OMNI_MODEL=/model \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    VLLM_CACHE_ROOT=/cache/vllm \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    PYTHONDONTWRITEBYTECODE=1
VOLUME /cache
WORKDIR /opt/triton-omni
USER 10001:10001
EXPOSE 8000 8001 8002

# A first start compiles kernels and reads the weights.
HEALTHCHECK --interval=10s --timeout=3s --start-period=15m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=2)"]

# In a container every address is the container's own; what is published decides who reaches it.
ENTRYPOINT ["python3", "-m", "triton_omni.supervisor.serve", "--model-repository", "/opt/triton-omni/model_repository", "--host", "0.0.0.0"]
