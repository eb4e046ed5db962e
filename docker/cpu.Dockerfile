# The host target: docker build -f docker/cpu.Dockerfile -t deep_comm:cpu . && docker run --rm deep_comm:cpu
FROM python:3.12-slim-bookworm
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "torch==2.13.0" numpy --index-url https://download.pytorch.org/whl/cpu
COPY . /src
RUN DEEP_COMM_CUDA=OFF pip install --no-cache-dir /src
WORKDIR /work
CMD ["python", "-m", "deep_comm.doctor"]
