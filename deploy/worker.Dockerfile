# syntax=docker/dockerfile:1
# An image for rollout workers: vLLM's own, with HistoSpec's client and adapter. Build it from the repository's root:
#   docker build -f deploy/worker.Dockerfile -t histospec-worker .
# For a trainer, give its image:  --build-arg BASE=docker.io/verlai/verl:vllm024.latest
# For a released version:         --build-arg HISTOSPEC=histospec==VERSION
# If pip needs your own index: --secret id=pip,src=$HOME/.config/pip/pip.conf; the image keeps nothing of it.

ARG VLLM=v0.32.0
ARG BASE=docker.io/vllm/vllm-openai:${VLLM}

FROM ${BASE} AS build
# What pip installs: this source, or a requirement such as histospec==VERSION.
ARG HISTOSPEC=.
WORKDIR /src
COPY . .
# A client alone: it needs no compiler.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    HISTOSPEC_CLIENT_ONLY=1 python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels "${HISTOSPEC}"

FROM ${BASE}
LABEL org.opencontainers.image.title="HistoSpec worker" \
      org.opencontainers.image.description="vLLM with drafts from a HistoSpec server" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /wheels /wheels
# pip adds what the image lacks, and leaves the versions of the image that fit. PIP_BREAK_SYSTEM_PACKAGES: the system's
# Python is vLLM's here, whoever installed it. The last command fails the build if the client does not run.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --root-user-action ignore /wheels/*.whl && \
    rm -r /wheels && \
    python3 -m histospec.client.doctor --help >/dev/null
