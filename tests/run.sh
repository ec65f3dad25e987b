#!/usr/bin/env bash
# Runs all tests: ruff, then every pytest test, the slow ones and the end-to-end runs included.
# Installs what they need into the active virtual environment, or into .venv, which it makes if there is none.
# Arguments go to pytest, in one process:  bash tests/run.sh -k plugin -x
# VERL_DIGEN_SKIP_INSTALL=1 leaves the environment as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${VIRTUAL_ENV:-}" && -z "${CONDA_PREFIX:-}" ]]; then
    [[ -d .venv ]] || "${PYTHON:-python3}" -m venv .venv
    # shellcheck disable=SC1091
    . .venv/bin/activate
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1
if [[ "${VERL_DIGEN_SKIP_INSTALL:-0}" != 1 ]]; then
    # torch first and by its exact version, so that nothing else decides which build comes
    python -m pip install --quiet "$(grep '^torch==' requirements-cpu.txt)"
    python -m pip install --quiet -r requirements-test.txt
    python -m pip install --quiet --no-deps --editable .
    # A browser for the page of `verl-digen report`; where there is none and none can be installed, its tests are skipped.
    if ! command -v chromedriver >/dev/null && command -v apt-get >/dev/null && [[ "$(id -u)" == 0 ]]; then
        { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver; } >/dev/null \
            || echo "tests/run.sh: no browser could be installed (chromium, chromium-driver)" >&2
    fi
fi

# Several processes of a run share the cores: one thread each is faster than a fight over them.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
# Nothing in the tests needs the network or an account.
export HF_HUB_OFFLINE=1 WANDB_MODE=offline RAY_USAGE_STATS_ENABLED=0 RAY_DISABLE_IMPORT_WARNING=1

# A finding of ruff fails the run, but does not hide what the tests say; pytest's summaries come last.
status=0
python -m ruff check . || status=$?
python -m ruff format --check . || status=$?

# A test that hangs is a failure: the longest takes minutes, none takes fifteen.
timeout_options=(--timeout=900)
if (($#)); then
    python -m pytest "${timeout_options[@]}" "$@" || status=$?
else
    # Tests in one process each use one core: two run at a time. The end-to-end runs have processes of their own.
    python -m pytest "${timeout_options[@]}" --numprocesses 2 --dist loadfile --ignore tests/e2e || status=$?
    python -m pytest "${timeout_options[@]}" tests/e2e || status=$?
fi
exit "$status"
