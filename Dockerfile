# Both images:   docker build --target operator -t registry.example.com/ballast/operator:0.1.0 .
#                docker build --target trainer  -t registry.example.com/ballast/trainer:0.1.0 .
# A model of your own: FROM the trainer's image, install your package, name it as model.name "module:callable".
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS workspace
RUN pip install --no-cache-dir uv==0.13.8
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PROJECT_ENVIRONMENT=/opt/ballast UV_PYTHON_DOWNLOADS=never
WORKDIR /src
# What is locked comes first: it changes less often than the code. --locked fails where uv.lock is stale.
COPY pyproject.toml uv.lock ./
COPY policies/pyproject.toml policies/
COPY operator/pyproject.toml operator/
COPY trainer-image/pyproject.toml trainer-image/
COPY client/pyproject.toml client/
COPY localcluster/pyproject.toml localcluster/
COPY lab/pyproject.toml lab/

FROM workspace AS build-operator
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --locked --no-dev --package ballast-operator --extra aws --extra gcp --extra ui --no-install-workspace
COPY policies policies
COPY client client
COPY operator operator
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --locked --no-dev --package ballast-operator --extra aws --extra gcp --extra ui --no-editable

FROM workspace AS build-trainer
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --locked --no-dev --package ballast-trainer --no-install-workspace
COPY policies policies
COPY trainer-image trainer-image
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --locked --no-dev --package ballast-trainer --no-editable

FROM ${PYTHON} AS runtime
LABEL org.opencontainers.image.source="https://github.com/ballast-dev/ballast" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 65532 ballast && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp ballast
COPY LICENSE /licenses/LICENSE
ENV PATH=/opt/ballast/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

FROM runtime AS trainer
LABEL org.opencontainers.image.title="Ballast trainer"
COPY --from=build-trainer /opt/ballast /opt/ballast
USER 65532:65532
CMD ["ballast-train", "pod"]

FROM runtime AS operator
LABEL org.opencontainers.image.title="Ballast operator"
COPY --from=build-operator /opt/ballast /opt/ballast
# One thread for the solver's libraries: the pod is not alone on its node.
ENV OMP_NUM_THREADS=1
USER 65532:65532
EXPOSE 8080 8090
ENTRYPOINT ["ballast"]
CMD ["operator"]
