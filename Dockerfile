# syntax=docker/dockerfile:1
# The operator's image: docker build -t ballast-operator .
# (The trainer's is trainer-image/Dockerfile.)
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
RUN pip install --no-cache-dir uv==0.13.8
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PROJECT_ENVIRONMENT=/opt/ballast UV_PYTHON_DOWNLOADS=never
WORKDIR /src
# Dependencies first: they change less often than the code. --locked fails where uv.lock is stale.
COPY pyproject.toml uv.lock README.md LICENSE ./
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --locked --extra operator --no-install-project
COPY operator operator
COPY policies policies
COPY localcluster/ballast_localcluster localcluster/ballast_localcluster
COPY trainer-image/ballast_trainer trainer-image/ballast_trainer
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --locked --extra operator --no-editable

FROM ${PYTHON}
LABEL org.opencontainers.image.title="Ballast operator" \
      org.opencontainers.image.source="https://github.com/ballast-dev/ballast" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 65532 ballast && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp ballast
COPY --from=build /opt/ballast /opt/ballast
COPY LICENSE /licenses/LICENSE
# One thread for the solver's libraries: the pod is not alone on its node.
ENV PATH=/opt/ballast/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["ballast"]
CMD ["operator"]
