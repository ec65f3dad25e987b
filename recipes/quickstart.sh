#!/usr/bin/env bash
# Reinforcement learning of a small diffusion model on two CPU cores, from nothing: makes a virtual environment, installs,
# trains handwritten digits through `python -m verl.trainer.main_ppo`, and shows that they got better.
#
#     bash recipes/quickstart.sh [OVERRIDE...]      for example  trainer.v1.digen.gap.enable=true
#
# Runs from any folder and as often as you like; each run leaves a new folder.
# Environment variables, all optional:
#   RECIPE=NAME              another recipe of the digits (default: digits; digits_reward_hacking shows what goes wrong)
#   VENV=DIR                 the virtual environment to make or to use (default: .venv in the checkout)
#   QUICKSTART_VENV=active   use the active environment as it is; nothing is made or installed
#   QUICKSTART_OUT=DIR       where this run's files go (default: runs/digits-TIME in the checkout)
#   PYTHON=COMMAND           the Python to make it with (default: the first of python3.11, python3.12, python3 that fits)
#   TORCH_INDEX_URL=URL      where torch is looked for besides the usual index (default: torch's own index of CPU builds,
#                            a tenth in size of the usual ones; empty: the usual index only)
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
STARTED=$SECONDS
say() { printf '\n==> %s\n' "$*"; }
fail() {
    printf '\nquickstart: %s\n' "$*" >&2
    exit 1
}

# ---- environment -------------------------------------------------------------------------------------------

fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3 python3.10}; do
        if fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 to 3.12 with the venv module found (tried: ${PYTHON:-python3.11 python3.12 python3 python3.10}); set PYTHON"
}

install_all() {
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    local torch index="${TORCH_INDEX_URL-https://download.pytorch.org/whl/cpu}"
    torch="$(grep '^torch==' "$ROOT/requirements-cpu.txt")"
    # Torch first and by its exact version, so that nothing else decides which build comes. An index that cannot be
    # reached is passed over by pip.
    say "installing $torch"
    python -m pip install --quiet --no-deps --retries 1 ${index:+--extra-index-url "$index"} "$torch"
    if python -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))'; then
        say "installing the other dependencies (requirements-cpu.txt)"
        python -m pip install --quiet -r "$ROOT/requirements-cpu.txt"
    fi
    say "installing verl-digen"
    (cd "$ROOT" && python -m pip install --quiet .) # a name with brackets or @ is no path to pip
}

if [[ "${QUICKSTART_VENV:-}" == active ]]; then
    command -v verl-digen >/dev/null || fail "QUICKSTART_VENV=active, but verl-digen is not installed in the active environment"
    say "using the active environment: $(command -v python)"
else
    VENV="${VENV:-$ROOT/.venv}"
    if [[ ! -x "$VENV/bin/python" ]]; then
        interpreter="$(find_python)"
        say "making the virtual environment $VENV with $("$interpreter" --version)"
        "$interpreter" -m venv "$VENV"
    fi
    # shellcheck disable=SC1091
    . "$VENV/bin/activate"
    install_all
fi
INSTALLED=$((SECONDS - STARTED))

# ---- model, prompts, training ------------------------------------------------------------------------------

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
OUT="${QUICKSTART_OUT:-$ROOT/runs/digits-$(date +%Y%m%d-%H%M%S)}"
[[ -e "$OUT" ]] && OUT="$OUT-$$"
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)"
cd "$OUT" # whatever veRL and Hydra write besides goes here; paths from here need no quoting for Hydra

say "model and prompts"
verl-digen prepare digits --out "$OUT/data" >"$OUT/prepare.log"

say "training digits (starting takes up to a minute; output: $OUT/train.log)"
export VERL_FILE_LOGGER_PATH="$OUT/metrics.jsonl"
verl-digen bench follow --log "$VERL_FILE_LOGGER_PATH" --pid $$ &
FOLLOWER=$!
trap 'kill "$FOLLOWER" 2>/dev/null || true' EXIT

train() {
    python -m verl.trainer.main_ppo --config-dir "$ROOT/recipes" --config-name "${RECIPE:-digits}" \
        trainer.val_before_train=true trainer.v1.digen.trace.every=8 "$@" \
        recipe.digits_dir=data trainer.default_local_dir=checkpoints 'trainer.logger=[console,file]'
}
if ! train "$@" >"$OUT/train.log" 2>&1; then
    printf '\n... the last lines of %s:\n' "$OUT/train.log" >&2
    tail -n 30 "$OUT/train.log" >&2
    fail "training failed"
fi
sleep 1 # the follower's last line
kill "$FOLLOWER" 2>/dev/null || true
wait "$FOLLOWER" 2>/dev/null || true
trap - EXIT

# ---- what came of it ---------------------------------------------------------------------------------------

say "reward and accuracy"
RESULT="$(verl-digen bench curve --log "$VERL_FILE_LOGGER_PATH" --run-dir "$OUT/checkpoints" --out "$OUT")" \
    || fail "no result; see $OUT/train.log"
sed '$d' <<<"$RESULT"
verl-digen report "$OUT/checkpoints" --out "$OUT/report.html"
echo "everything of this run: $OUT"
echo "total time: $((SECONDS - STARTED)) s, of which installing: $INSTALLED s"
tail -n 1 <<<"$RESULT"
