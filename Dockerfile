# The trainer, with SGLang in an environment of its own beside it, since SGLang pins other versions of torch and transformers.
# It was linted by eye and never built: no machine of ours has Docker. docs/gpu.md says what to report.
#   docker build -t vlmrl .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -v $PWD:/work vlmrl make -C /opt/vlmrl gpu-acceptance
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev git make build-essential libnuma1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/vlmrl
# Dependencies first: the layers stay when only the code changes.
COPY pyproject.toml Makefile README.md LICENSE ./
COPY vlmrl vlmrl
RUN make install
RUN make .venv-sglang/.installed
COPY . .
ENV PATH=/opt/vlmrl/.venv/bin:$PATH
WORKDIR /work
CMD ["vlmrl", "doctor"]
