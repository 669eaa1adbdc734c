# The command line and the server in a container, on the CPU or, with PyPI's build of PyTorch, on CUDA:
#
#     docker build --tag xret .
#     docker build --tag xret:cuda --build-arg INDEX=https://pypi.org/simple .
#     docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/data" xret demo
#     docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/data" --gpus all --shm-size 8g xret:cuda extract …
#     docker run --rm --publish 7860:7860 --env XRET_TOKEN --volume "$PWD:/data" xret serve run --host 0.0.0.0 --port 7860
FROM python:3.12-slim
ARG INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch torchvision --index-url "$INDEX"
WORKDIR /source
COPY pyproject.toml README.md LICENSE py.typed *.py ./
COPY cli cli
COPY data_manifests data_manifests
COPY demo demo
COPY heads heads
COPY pipeline pipeline
RUN pip install --no-cache-dir '.[index,parquet,plots,s3,serve]'
# Downloaded weights stay in the folder that is mounted.
ENV HOME=/data
WORKDIR /data
RUN chown 1000:1000 /data
# A number: Kubernetes cannot tell of a name whether it is root.
USER 1000:1000
ENTRYPOINT ["xret"]
