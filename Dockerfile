# `geodl serve` as an image; docs/serve.md has the two commands. No root, and nothing is written but /models and /tmp.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN python -m venv /opt/geodl
RUN /opt/geodl/bin/pip install --no-cache-dir --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu ".[serve,pretrained,heif,onnx]"

FROM python:3.12-slim
COPY --from=build /opt/geodl /opt/geodl
RUN mkdir /models && chown 10001:10001 /models
USER 10001:10001
ENV PATH=/opt/geodl/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1
VOLUME /models
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/api/v1/model', timeout=5)"]
ENTRYPOINT ["geodl", "serve"]
CMD ["/models/model", "--host", "0.0.0.0"]
