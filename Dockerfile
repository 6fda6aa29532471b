# The images:   docker build --target operator    -t registry.example.com/ballast/operator:0.1.0 .
#               docker build --target trainer     -t registry.example.com/ballast/trainer:0.1.0 .
#               docker build --target trainer-cpu -t registry.example.com/ballast/trainer-cpu:0.1.0 .
#               docker build --target trainer-dev -t registry.example.com/ballast/trainer-dev:0.1.0 .
# A model of your own: FROM the trainer's image, install your package, name it as model.name "module:callable";
# trainer-dev has pip, a C++ compiler (torch.compile) and transformers for that.
# The same bytes in each build: SOURCE_DATE_EPOCH=0 docker buildx build --output type=image,rewrite-timestamp=true,
# or buildah bud --timestamp 0.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS workspace
# strip, for scripts/tidy-image.
RUN ! command -v apt-get || \
    { apt-get update && apt-get install -y --no-install-recommends binutils && rm -rf /var/lib/apt/lists/*; }
# An environment of its own: a distribution's Python keeps its packages to itself.
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv==0.13.8
# Without a cache packages need half the space: scripts/build-images.
ARG UV_NO_CACHE=false UV_LINK_MODE=copy
ENV PATH=/opt/uv/bin:$PATH UV_NO_CACHE=$UV_NO_CACHE UV_LINK_MODE=$UV_LINK_MODE UV_PROJECT_ENVIRONMENT=/opt/ballast UV_PYTHON_DOWNLOADS=never
WORKDIR /src
COPY scripts/tidy-image scripts/
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
# cvxpy names solvers and a differentiator that no policy asks for, and rich a highlighter of source code: 210 MB.
RUN uv pip uninstall --python /opt/ballast \
    scs osqp joblib setuptools sparsediffpy pygments markdown-it-py mdurl && \
    scripts/tidy-image /opt/ballast ballast_operator ballast_policies ballast_client

FROM workspace AS build-trainer
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --locked --no-dev --package ballast-trainer --no-install-workspace
COPY policies policies
COPY client client
COPY trainer-image trainer-image
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --locked --no-dev --package ballast-trainer --no-editable
RUN scripts/tidy-image /opt/ballast ballast_trainer ballast_policies ballast_client

# PyTorch's own index has its build for CPUs, of the locked version, x86 and arm64; PyPI has none for Linux from 2.11 on.
# Elsewhere from: --build-context wheels=FOLDER, with a wheel of that version, or --build-arg TORCH_INDEX=MIRROR.
FROM scratch AS wheels
FROM workspace AS build-trainer-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/uv --mount=type=bind,from=wheels,target=/wheels \
    uv export --locked --no-dev --package ballast-trainer --no-emit-workspace --no-hashes -q -o locked.txt && \
    grep -vE '^(torch|triton|nvidia-[a-z0-9-]*|cuda-[a-z0-9-]*)(\[.*\])?==' locked.txt > others.txt && \
    torch=$(sed -nE 's/^(torch==[0-9.]+).*/\1/p' locked.txt) && \
    if ls /wheels/torch-* >/dev/null 2>&1; then source="--no-index --find-links /wheels"; \
    else source="--index-url $TORCH_INDEX" torch=$torch+cpu; fi && \
    uv venv -q /opt/ballast && \
    { UV_HTTP_TIMEOUT=10 uv pip install --python /opt/ballast --no-deps $source "$torch" || \
    { echo "$torch cannot be had by $source. To fix: name a mirror (--build-arg TORCH_INDEX=URL) or a folder with the" \
    "wheel (--build-context wheels=FOLDER), or build the target trainer: 5 GB, and it trains on CPUs, too." >&2; exit 1; }; } && \
    uv pip install --python /opt/ballast --no-deps -r others.txt
COPY policies policies
COPY client client
COPY trainer-image trainer-image
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --python /opt/ballast --no-deps ./policies ./client ./trainer-image
RUN scripts/tidy-image /opt/ballast ballast_trainer ballast_policies ballast_client

FROM build-trainer AS build-trainer-dev
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --locked --no-dev --package ballast-trainer --extra transformers --no-editable && \
    uv pip install --python /opt/ballast pip

# The base without what a container never runs: its package manager, pip, documentation, rights of root.
FROM ${PYTHON} AS system
RUN SOURCE_DATE_EPOCH=0 groupadd --gid 65532 ballast && \
    SOURCE_DATE_EPOCH=0 useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp ballast && \
    find / -xdev -perm /6000 -type f -exec chmod a-s {} + && \
    for python in /usr/lib/python3* /usr/local/lib/python3*; do \
    rm -rf "$python/ensurepip" "$python/idlelib" "$python/lib2to3" "$python/test" "$python/turtledemo" \
    "$python"/config-* "$python"/site-packages/pip* "$python"/site-packages/setuptools*; done && \
    rm -rf /usr/share/doc /usr/share/man /usr/share/info /usr/share/locale /usr/share/python-wheels \
    /usr/share/perl* /usr/lib/*-linux-gnu/perl* /usr/lib/*-linux-gnu/libperl* /usr/bin/perl* /usr/bin/apt* /usr/lib/apt /usr/lib/*-linux-gnu/libapt-* \
    /etc/apt /var/lib/apt /var/cache/* /var/log/* /usr/local/bin/pip* && \
    rm -rf /usr/lib/*-linux-gnu/gconv /usr/share/zoneinfo/right /var/lib/dpkg/info /usr/bin/dpkg* /usr/bin/gpgv /usr/bin/openssl && \
    find /usr/sbin -mindepth 1 ! -name 'ldconfig*' -delete && \
    # Libraries of the package manager's and of logins, and the tools of util-linux that need them: 11 MB.
    (cd /usr/bin && rm -f lslogins logger lsblk findmnt lsfd wdctl) && rm -rf /usr/lib/*-linux-gnu/security && \
    for name in gnutls unistring idn2 p11-kit nettle hogweed tasn1 systemd gcrypt gpg-error udev sepol semanage ext2fs; do \
    rm -f /usr/lib/*-linux-gnu/lib"$name"[.-]*; done && \
    find /usr -type d -name __pycache__ -prune -exec rm -rf {} + && \
    python3 -m compileall -q --invalidation-mode unchecked-hash \
    "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"

FROM scratch AS runtime
LABEL org.opencontainers.image.source="https://github.com/ballast-dev/ballast" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=system / /
COPY LICENSE /licenses/LICENSE
ENV PATH=/opt/ballast/bin:/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

FROM runtime AS trainer
LABEL org.opencontainers.image.title="Ballast trainer"
COPY --from=build-trainer /opt/ballast /opt/ballast
USER 65532:65532
CMD ["ballast-train", "pod"]

FROM runtime AS trainer-cpu
LABEL org.opencontainers.image.title="Ballast trainer for CPUs"
COPY --from=build-trainer-cpu /opt/ballast /opt/ballast
USER 65532:65532
CMD ["ballast-train", "pod"]

FROM ${PYTHON} AS trainer-dev
LABEL org.opencontainers.image.title="Ballast trainer, to build upon" \
      org.opencontainers.image.licenses="Apache-2.0"
# What is compiled includes Python's headers: Debian's, where the base has none of its own.
RUN headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))') && \
    apt-get update && apt-get install -y --no-install-recommends g++ $([ -e "$headers/Python.h" ] || echo libpython3-dev) && \
    rm -rf /var/lib/apt/lists/* && \
    groupadd --gid 65532 ballast && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp ballast
COPY --from=build-trainer-dev --chown=65532:65532 /opt/ballast /opt/ballast
ENV PATH=/opt/ballast/bin:$PATH PYTHONUNBUFFERED=1
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
