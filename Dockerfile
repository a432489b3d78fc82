# The command line of gigagrad in a container, from the wheel that `make dist` builds: docs/how-to/containers.md.
FROM python:3.12-slim

# Empty: PyTorch as the default index has it, with CUDA on Linux. Else the index of PyTorch's builds for the CPU.
ARG TORCH_INDEX=""
ARG EXTRAS="train,report,demo,view,bags"

COPY constraints.txt dist/gigagrad-*.whl /tmp/
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /tmp/gigagrad-*.whl)[$EXTRAS]" \
    && rm /tmp/constraints.txt /tmp/gigagrad-*.whl \
    && useradd --create-home --uid 1000 gigagrad \
    && install --directory --owner gigagrad /work

USER 1000
WORKDIR /work
ENTRYPOINT ["gigagrad"]
CMD ["doctor"]
