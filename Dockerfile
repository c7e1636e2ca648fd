# syntax=docker/dockerfile:1
# The server and its command line. Build from the repository's root: docker build -t histospec .
# If pip needs your own index: --secret id=pip,src=$HOME/.config/pip/pip.conf; the image keeps nothing of it.

# For newer patches, take the digest that `docker buildx imagetools inspect python:3.12-slim-bookworm` shows.
ARG BASE=docker.io/library/python:3.12.15-slim-bookworm@sha256:54c85f3c47607a77f32adec749d3c81d1348bf25833671f512b26a9b6d778cb3

FROM ${BASE} AS build
# The compiler stays in this stage, so its version is Debian's of the day.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# Every package is pinned with hashes (make lock), so that the same commit builds the same image.
COPY requirements requirements
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir --only-binary :all: \
        --require-hashes -r requirements/build.txt && \
    python -m venv /opt/histospec && /opt/histospec/bin/pip install --no-cache-dir --only-binary :all: \
        --require-hashes -r requirements/image.txt
COPY . .
RUN /opt/build/bin/pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /wheels . && \
    /opt/histospec/bin/pip install --no-cache-dir --no-index --no-deps /wheels/*.whl && \
    /opt/histospec/bin/pip check

FROM ${BASE}
LABEL org.opencontainers.image.title="HistoSpec" \
      org.opencontainers.image.description="A draft server that makes RL rollouts faster" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/histospec /opt/histospec
RUN install -d -m 0700 -o 65532 -g 65532 /data
# Large blocks stay with the process: about twice the steps a second at 16 streams.
ENV PATH=/opt/histospec/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    MALLOC_TRIM_THRESHOLD_=268435456 \
    MALLOC_MMAP_THRESHOLD_=33554432 \
    MALLOC_TOP_PAD_=16777216 \
    HISTOSPEC_LISTEN=0.0.0.0:6378 \
    HISTOSPEC_HTTP=0.0.0.0:9464 \
    HISTOSPEC_DATA_DIR=/data
USER 65532:65532
WORKDIR /data
VOLUME /data
EXPOSE 6378 9464
# /readyz succeeds when the store is open and no drain has begun.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9464/readyz', timeout=4)"]
# Without --tokens, --tls-client-ca or --insecure the server refuses to start, because it listens beyond loopback.
ENTRYPOINT ["histospec"]
CMD ["serve"]
