# GPUs inside one NVLink domain:
#   docker build -f docker/cuda.Dockerfile -t deep_comm:cuda .
#   docker run --rm --gpus all --ipc host deep_comm:cuda
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "torch>=2.11" numpy --index-url https://download.pytorch.org/whl/cu130
# The GPUs to build for: docker build --build-arg CUDA_ARCHS="80;90a"
ARG CUDA_ARCHS=90a
COPY . /src
RUN DEEP_COMM_CUDA=ON DEEP_COMM_CUDA_ARCHS="${CUDA_ARCHS}" pip install --no-cache-dir /src
WORKDIR /work
CMD ["python", "-m", "deep_comm.doctor"]
