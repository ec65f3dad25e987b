"""Packaging of verl-digen. ``pip install .`` is all veRL needs to find the plugin."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
version: dict = {}
exec((HERE / "verl_digen" / "version.py").read_text(), version)

setup(
    name="verl-digen",
    version=version["__version__"],
    description="Reinforcement-learning post-training of diffusion models as a veRL plugin",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    # hydra_plugins: the namespace package in which Hydra discovers plugins (no __init__.py in it).
    # verl_digen.patches and verl_digen.recipes: the folders at the top, shipped as data.
    packages=[
        *find_packages(include=["verl_digen", "verl_digen.*"]),
        *("hydra_plugins", "verl_digen.patches", "verl_digen.recipes"),
    ],
    package_dir={
        "hydra_plugins": "verl_digen/hydra_plugins",
        "verl_digen.patches": "patches",
        "verl_digen.recipes": "recipes",
    },
    package_data={
        "verl_digen": ["**/*.yaml", "**/*.safetensors", "**/*.json", "**/*.npz", "bench/page/*"],
        "verl_digen.patches": ["*.patch", "*.md"],
        "verl_digen.recipes": ["**/*.yaml"],
    },
    include_package_data=False,
    install_requires=[
        "verl==0.9.1",
        # veRL 0.9.1 imports these three in every run, but requires them only in its extra verl-core
        "cachetools",
        "fastapi",
        "uvicorn",
        "torch>=2.9",
        "diffusers>=0.38.0",
        "accelerate",
        "transformers>=5.5.3,<5.11",
        "tensordict>=0.8.0,<=0.10.0,!=0.9.0",
        "TransferQueue>=0.1.10",
        "ray[default]>=2.41.0",
        "hydra-core>=1.3",
        "omegaconf>=2.3",
        "peft",
        "safetensors",
        "numpy>=2.0.0",
        "pandas",
        "pyarrow>=19.0.0",
        "pillow",
        "psutil",
        "matplotlib",
        "rich",
        "tensorboard",
        "tqdm",
        "wrapt",
        "PyYAML",
    ],
    extras_require={
        # vllm-omni 0.24.0 goes with vllm 0.24.0 and itself pins diffusers 0.38.0
        "vllm": ["vllm==0.24.0", "vllm-omni==0.24.0", "diffusers==0.38.0"],
        "flash-attn": ["flash-attn"],
        "npu": ["torch-npu"],
        "ocr": ["rapidocr", "onnxruntime"],
        "wandb": ["wandb"],
        # only to rebuild the shipped digits weights: where it is installed, transformers imports it (and SciPy) in
        # every process, which adds seconds to the start
        "digits": ["scikit-learn"],
        "test": ["pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", "scikit-learn", "selenium"],
        "docs": ["mkdocs"],
    },
    entry_points={
        "verl.plugins": ["verl_digen = verl_digen.plugin"],
        "console_scripts": ["verl-digen = verl_digen.cli.main:main"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
