# The images of Echelon, for one machine and for the objects of `echelon kube render` (docs/kubernetes.md):
#   docker build --target cpu  -t REGISTRY/echelon:cpu .
#   docker build --target cuda -t REGISTRY/echelon:cuda .
# --build-arg EXTRAS=[atari,box2d] adds optional dependencies, --build-arg RAY=2.60.0 adds Ray, for KubeRay.
# Your own environments: FROM REGISTRY/echelon:cpu, then install them as root and end with USER 1000:1000.
FROM python:3.11-slim AS source
# The probes of KubeRay's operator need bash and wget; those of `echelon kube render` sh, find and grep.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 echelon \
    && useradd --uid 1000 --gid 1000 --create-home echelon \
    && install --directory --owner=1000 --group=1000 /runs
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/echelon
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src

# torch comes first, from the index that has the variant; constraints.txt pins its version.
FROM source AS cpu
ARG EXTRAS="" RAY=""
RUN pip install --constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
    && pip install --constraint constraints.txt ".${EXTRAS}" ${RAY:+"ray[default]==${RAY}"}
WORKDIR /runs
USER 1000:1000
CMD ["echelon", "--help"]

# torch of PyPI brings the libraries of CUDA; the driver comes from the node.
FROM source AS cuda
ARG EXTRAS="" RAY=""
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
RUN pip install --constraint constraints.txt torch \
    && pip install --constraint constraints.txt ".${EXTRAS}" ${RAY:+"ray[default]==${RAY}"}
WORKDIR /runs
USER 1000:1000
CMD ["echelon", "--help"]
