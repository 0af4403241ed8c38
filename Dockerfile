# All images of a run, a target each: docker build --target syncer .   (learner, syncer, coordinator, nats)
# A release is built by deploy/images/build, with the base images' digests (make pin-images).
#
# Layers, from what changes least to what changes most: Python, packages (JAX on top of the others'), our code, compiled
# kernels. Packages are installed by hash, and nothing is built from source but our own wheels.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG NATS_IMAGE=nats:2-alpine

FROM ${PYTHON_IMAGE} AS base
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /state --shell /usr/sbin/nologin diloco \
 && install -d -o diloco -g diloco /state \
 && python -m venv --without-pip /opt/venv
COPY --chmod=755 deploy/images/start /opt/start
# The allocator's settings are those of diloco.nats.connection.malloc_environment. A service's files are in /state, a volume.
ENV PATH=/opt/venv/bin:$PATH \
    MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648 MALLOC_TOP_PAD_=1048576 \
    NUMBA_CACHE_DIR=/state/cache/numba \
    DILOCO_STATE_DIR=/state DILOCO_ALIVE_FILE=/tmp/alive
# a service touches the file whenever it has told the others that it is there (twice a second), connected to its servers
HEALTHCHECK --interval=15s --timeout=10s --retries=3 --start-period=120s \
    CMD test -n "$(find /tmp/alive -newermt '15 seconds ago')"
WORKDIR /state
ENTRYPOINT ["/opt/start"]

# its program is also in the coordinator's image: `diloco restore` completes a log at a server of its own
FROM ${NATS_IMAGE} AS server

# ---- packages; their tests and debugging symbols are left out

FROM base AS binutils
RUN apt-get -qq update && apt-get -qq install -y --no-install-recommends binutils >/dev/null

FROM base AS packages
COPY requirements/services.txt /tmp/
RUN --mount=type=cache,target=/var/cache/pip --mount=from=binutils,source=/usr,target=/binutils \
    PIP_CACHE_DIR=/var/cache/pip pip --python /opt/venv/bin/python install --require-hashes --only-binary :all: -r /tmp/services.txt \
 && rm /tmp/services.txt && cd /opt/venv/lib/python3.*/site-packages \
 && LD_LIBRARY_PATH="$(echo /binutils/lib/*-linux-gnu)" /binutils/bin/strip --strip-unneeded zstandard/*.so llvmlite/binding/*.so \
 && find num* -name tests -prune -exec rm -r {} +

# of the command line, which each image has: people ask `diloco doctor` there
FROM packages AS command-packages
COPY requirements/coordinator.txt /tmp/
RUN --mount=type=cache,target=/var/cache/pip \
    PIP_CACHE_DIR=/var/cache/pip pip --python /opt/venv/bin/python install --require-hashes --only-binary :all: -r /tmp/coordinator.txt \
 && rm /tmp/coordinator.txt

FROM command-packages AS learner-packages
COPY requirements/learner.txt /tmp/
RUN --mount=type=cache,target=/var/cache/pip \
    PIP_CACHE_DIR=/var/cache/pip pip --python /opt/venv/bin/python install --require-hashes --only-binary :all: -r /tmp/learner.txt \
 && rm /tmp/learner.txt && cd /opt/venv/lib/python3.*/site-packages \
 && find scipy -name tests -prune -exec rm -r {} +

# ---- our code, as it lies in the images

FROM base AS code
COPY requirements/build.txt /tmp/
RUN --mount=type=cache,target=/var/cache/pip \
    python -m venv /opt/build \
 && PIP_CACHE_DIR=/var/cache/pip /opt/build/bin/pip install --require-hashes --only-binary :all: -r /tmp/build.txt
COPY shared /src/shared
COPY services /src/services
COPY report /src/report
COPY ops /src/ops
RUN for part in shared services/learner services/syncer services/coordinator report ops; do \
      /opt/build/bin/pip wheel --no-deps --no-build-isolation --no-cache-dir -w "/wheels/$part" "/src/$part" \
      && pip --python /opt/venv/bin/python install --no-deps --no-index --root "/code/$part" "/wheels/$part"/*.whl || exit 1; \
    done

# compiled for the machine that builds; another kind of processor compiles them once more, into the volume
FROM packages AS kernels
COPY --from=code /code/shared /
RUN NUMBA_CACHE_DIR=/opt/kernels python -c "import diloco.core.tensors.kernels"

# ---- the images

FROM command-packages AS syncer
COPY --from=code /code/shared /code/services/syncer /code/services/coordinator /code/report /code/ops /
COPY --from=kernels /opt/kernels /opt/kernels
USER diloco
CMD ["diloco-syncer"]
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title=diloco-syncer org.opencontainers.image.version=$VERSION org.opencontainers.image.revision=$REVISION

# also the relay between the regions, and what watches a server
FROM command-packages AS coordinator
COPY --from=server /usr/local/bin/nats-server /usr/local/bin/
COPY --from=code /code/shared /code/services/coordinator /code/report /code/ops /
COPY --from=kernels /opt/kernels /opt/kernels
USER diloco
CMD ["diloco-coordinator"]
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title=diloco-coordinator org.opencontainers.image.version=$VERSION org.opencontainers.image.revision=$REVISION

FROM learner-packages AS learner
ENV DILOCO_CACHE_DIR=/state/cache/jax
COPY --from=code /code/shared /code/services/learner /code/services/coordinator /code/report /code/ops /
COPY --from=kernels /opt/kernels /opt/kernels
USER diloco
CMD ["diloco-learner"]
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title=diloco-learner org.opencontainers.image.version=$VERSION org.opencontainers.image.revision=$REVISION

FROM server AS nats
# as diloco_ops.broker.server.GO_ENVIRONMENT
ENV GOGC=25
RUN mkdir /data && chown 10001:10001 /data
COPY --chmod=755 deploy/images/serve /opt/serve
ENTRYPOINT ["/opt/serve"]
USER 10001:10001
ARG VERSION=0.2.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title=diloco-nats org.opencontainers.image.version=$VERSION org.opencontainers.image.revision=$REVISION
