#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The one entry point: sets up an environment, serves, demonstrates, checks and tests. `./build.sh --help` lists it all.
# Everything it makes lies in .venv and .cache beside it.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VENV=$ROOT/.venv
CACHE=$ROOT/.cache
LOGS=$CACHE/logs
TRITON_HOME_DIR=$VENV/share/tritonserver
REPOSITORY=$ROOT/model_repository
PAGE_TOOLS=$CACHE/page-tools
PERF_ANALYZER_DIR=$CACHE/perf-analyzer
CLIENTS=$CACHE/clients
COVERAGE_FLOOR=85

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "build.sh: $*"
    exit 1
}

# --- children and signals ---------------------------------------------------------------------------------------------

CHILDREN=()

# child COMMAND…: runs it so that a signal to this script ends it, at once and with SIGTERM alone (a Python that starts
# up answers Ctrl-C with a traceback; a child in the background does not get it).
child() {
    local status=0
    "$@" 9>&- &
    CHILDREN+=($!)
    wait $! || status=$?
    unset 'CHILDREN[-1]'
    return "$status"
}

end_children() {
    local status=$? number
    trap - EXIT
    trap '' HUP INT TERM # all are told once: a second Ctrl-C must leave no server
    for ((number = ${#CHILDREN[@]} - 1; number >= 0; number--)); do
        kill -TERM "${CHILDREN[number]}" 2>/dev/null || true
        wait "${CHILDREN[number]}" || true
        # The server hears that its client is gone; told to stop before, it would wait for the client's request.
        if ((number > 0)); then sleep 1; fi
    done
    exit "$status"
}

# Exit codes as a shell has them: 128 + the signal's number.
end_on_signals() {
    trap end_children EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
}

# --- help -------------------------------------------------------------------------------------------------------------

help_main() {
    cat <<'TEXT'
Usage: ./build.sh COMMAND [options]      (./build.sh COMMAND --help tells more)

  setup           make .venv, install the pinned dependencies, find or fetch tritonserver and the checkpoint
  demo [TEXT]     serve, ask TEXT, stream the reply's text, write its speech (reply.wav, reply.png), stop the server
  serve           serve until Ctrl-C; prints one READY line with the addresses
  gateway         serve OpenAI's HTTP API until Ctrl-C, with a server of its own or in front of one
  doctor          examine running servers: ledger, stages, metrics, shared memory; exit code 1 = something is wrong
  bench [OPTIONS] measure a server as a listener would: time to first audio, underruns, real-time factor
  evaluate [OPTS] judge a server's replies: speech that is understood, pictures and sounds that are recognised
  soak [OPTIONS]  ask a server thousands of requests of all kinds, disturb it, and say what it did wrong
  test [ARGS]     all checks and tests; with ARGS: `pytest ARGS` alone
  coverage        all tests, and the lines of the project that none of them runs
  check           formatting, lint and types
  clean           remove everything this script made

Environment:
  OMNI_MODEL      checkpoint to serve: a folder, a Hugging Face id such as Qwen/Qwen2.5-Omni-7B, or random:7b
                  (also 3b, tiny): random weights of that size, which speak noise
                  (default: training/mini, a small trained one that comes with the repository)
  OMNI_PLATFORM   cpu or gpu (default: gpu where an NVIDIA GPU is found)
  CHROMIUM        the browser that tests the page, or none for no such tests (default: one is fetched from npm)
  OMNI_PROFILE    settings of servers, as by serve --profile (default: as model_repository has them)
  OMNI_MPS        1 = servers run under CUDA MPS, as by serve --mps (default: 0)
  OMNI_GPUS       the GPU of each stage, as by serve --gpus (default: all on GPU 0)
  PERF_ANALYZER   NVIDIA's program that a test measures a server with (default: the one of a pinned wheel)
  PYTHON          the Python 3.11 or 3.12 to build .venv with (default: the first found on PATH)
TEXT
}

help_setup() {
    cat <<'TEXT'
Usage: ./build.sh setup

Makes .venv with the pinned dependencies of this machine's platform (requirements/cpu.lock or gpu.lock) and of checks,
tests and benchmarks (requirements/dev.lock), takes tritonserver from PATH or from a pinned wheel, and makes or fetches
the checkpoint that OMNI_MODEL names, if it names one.
What is already there is kept: a second run takes a moment. All other commands run it first.
TEXT
}

help_demo() {
    cat <<'TEXT'
Usage: ./build.sh demo [TEXT]            (default: "Tell me a story")

Starts the server on free loopback ports, asks TEXT, streams the reply's text to the terminal and writes its speech to
reply.wav (24 kHz mono) and its spectrogram to reply.png in the current folder. Then it tells the time to first text and
first audio, the seconds of audio and the real-time factor. The server is stopped afterwards, whatever happened.
OMNI_MODEL names the checkpoint. Without OMNI_MODEL it is training/mini, which knows a small world of English: it tells
stories, answers questions and repeats what follows "Say:".
TEXT
}

help_serve() {
    cat <<'TEXT'
Usage: ./build.sh serve [--host HOST] [--http-port N] [--grpc-port N] [--metrics-port N]
                        [--log-file FILE] [--log-verbose N] [--log-format plain|json] [--profile NAME|FILE] [--mps]
                        [--gpus STAGE=N,...] [--ready-timeout SECONDS] [--drain-timeout SECONDS] [--exit-timeout SECONDS]
                        [--no-warm-up] [--no-stall-guard] [--client-shared-memory] [--version]

Serves until Ctrl-C or SIGTERM. Reports each step of the start on standard error. Prints
`READY http=… grpc=… metrics=…` once every model is loaded and the server has spoken a reply of its own
(--no-warm-up: without that reply).
Defaults: --host 127.0.0.1 --http-port 8000 --grpc-port 8001 --metrics-port 8002. Port 0 takes a free one.
The server's log goes to .cache/logs/server.log, or to --log-file, whose folder must be there.
With --profile small the server fits on a GPU of 24 GB; a file of that form (backend_src/triton_omni/profiles) has other
settings that go before those of model_repository.
With --mps the stages run on a GPU at once instead of by turns, under a CUDA MPS daemon that lives as long as the server.
With --client-shared-memory gRPC callers on this machine may give their inputs in shared memory; trust each of them then.
With --no-stall-guard the server runs without the library that lets it outlive a stage that stands still or dies.
With --gpus a stage runs on another GPU than 0: thinker=0,talker=0,token2wav=1, for instance.
Told to stop, it refuses new requests and finishes replies for --drain-timeout seconds at most (default 30); told again,
it stops at once.
It gives up a start that takes longer than --ready-timeout (default 900 s), and a Triton that takes longer to stop than
--exit-timeout (default 30 s), counted from when no reply is under way.
The server has no authentication: keep it on loopback, or put a proxy that has in front of it.
TEXT
}

help_gateway() {
    cat <<'TEXT'
Usage: ./build.sh gateway [--host HOST] [--port N] [--url HOST:PORT] [--api-keys FILE] [OPTIONS]

Serves OpenAI's HTTP API (chat completions, speech, models) until Ctrl-C or SIGTERM. Without --url it starts a server of
its own on free loopback ports and stops it afterwards; with --url it uses the one whose gRPC endpoint is there, and
with several --url it spreads requests over them.
Prints `READY openai=… grpc=…` once; the first address is the base URL for OpenAI clients.
Defaults: --host 127.0.0.1 --port 8080. Port 0 takes a free one.
Callers need an API key where keys are set: --api-keys FILE (one a line) or OMNI_API_KEYS (separated by commas).
All options: .venv/bin/triton-omni-gateway --help; what it takes and answers: gateway/README.md
TEXT
}

help_doctor() {
    cat <<'TEXT'
Usage: ./build.sh doctor [--server PID] [--metrics-url URL] [--persist SECONDS]

Examines the servers that run here as this user, also under load, and only reads: whether each stage holds what the
session ledger says, its process lives and its loop turns, no session is over its deadline, shared memory is somebody's,
and the server is ready. What is wrong for 10 s (--persist) is told, a sentence each; what only moves does not stay.
With --server only the tritonserver of this process id; with --metrics-url alone one elsewhere, by its metrics.
A server that is not up yet is told as such, with what it has loaded.
Exit code: 0 = sound, 1 = something is wrong, a server still starts, or none runs here, 2 = wrong usage.
TEXT
}

help_bench() {
    cat <<'TEXT'
Usage: ./build.sh bench [OPTIONS of `triton-omni bench`]

Loads a server and reports, as tables, JSON (bench.json) and plots (PNG): time to first text and first audio, gaps and
underruns, real-time factor, throughput, and memory a stage on NVIDIA GPUs. Without --url it starts a server of its own
on free loopback ports and stops it afterwards. For example
  ./build.sh bench --concurrency 1,8,32
  ./build.sh bench --rate 2,4 --url localhost:8001
All options: .venv/bin/triton-omni bench --help; what the figures mean: docs/benchmarks.md

`./build.sh bench micro [OPTIONS]` times each stage alone, without a server, beside plain vLLM and HF (micro.json);
its options: ./build.sh bench micro --help. Without OMNI_MODEL it measures random weights of the tiny size.

`./build.sh bench compare --variant NAME=JSON ... -- [OPTIONS]` serves one variant of the stages' settings after another
and loads each alike; its options: ./build.sh bench compare --help
TEXT
}

help_evaluate() {
    cat <<'TEXT'
Usage: ./build.sh evaluate [--model CHECKPOINT] [--asr NAME] [OPTIONS of `triton-omni evaluate`]

Asks a server sentences, pictures and sounds with fixed seeds, and judges the replies: word errors by a recogniser,
skipped and repeated words, distance to a reference setting, clicks, clipping, silence, voices, and right answers. Prints
a table; writes evaluate.json, the speech as WAV files and plots to FOLDER (-o, default: evaluate-out). Without --url it
starts a server of its own on free loopback ports and stops it afterwards. Exit code 1 tells of a failed request or a
missed bound. For example
  ./build.sh evaluate --model /models/Qwen2.5-Omni-7B --max-word-errors 15 --min-pictures 90
--model is what OMNI_MODEL is elsewhere. All options: .venv/bin/triton-omni evaluate --help
TEXT
}

help_soak() {
    cat <<'TEXT'
Usage: ./build.sh soak [--requests N] [--minutes M] [--concurrency N] [--kills N] [--seed N] [--out FOLDER] [OPTIONS]

Starts a server and asks it text, images, sounds, videos and chats, spoken or not, by gRPC and HTTP, streamed or whole; with
--turns SHARE also turns of conversations. With --model training/mini --meaning SHARE it also asks questions whose right
replies are known, and judges their texts, the words heard in their speech, and their voices.
Some clients go away at any moment, read nothing for seconds, cannot be served in time, or ask nonsense; stages are
killed. Every request must end exactly once and as it should, equal requests must get equal replies, memory and time to
first audio must stay, nothing may be left, and the server must stop within 10 s. Writes soak.json, soak.png and the
server's log to FOLDER (default: soak-out). Exit code 1 tells of a fault. Without OMNI_MODEL it asks random weights of the
tiny size. For example
  ./build.sh soak --requests 20000 --concurrency 12 --kills 6
All options: .venv/bin/python scripts/soak --help; what they showed: docs/reliability.md
TEXT
}

help_test() {
    cat <<'TEXT'
Usage: ./build.sh test [PYTEST_ARGS]

Without arguments: `check`, then all tests (unit, page, reference, server, hostile). Without a GPU, on two cores or more,
four workers share them out: one of them runs all that needs the shared server. While it starts others beside that one,
the other workers run, with the lowest priority, tests that need little memory, as the fourth does from the start. With
arguments: `pytest PYTEST_ARGS` alone, in one process, for example
  ./build.sh test tests/unit -k plan
The last line is pytest's own summary. The gateway's page is tested in a headless Chromium that the first run fetches
from npm into .cache, without root; CHROMIUM=/path/to/chromium takes another, CHROMIUM=none skips these tests.
It fetches NVIDIA's perf_analyzer, too, as a wheel from the index; PERF_ANALYZER=/path/to/perf_analyzer takes another.
Clients of OpenAI's API that tests run against the gateway get an environment of their own, .cache/clients (1 GB).
TEXT
}

help_coverage() {
    cat <<'TEXT'
Usage: ./build.sh coverage

Runs all tests, as `test` does, and lists the lines of backend_src, client and gateway that none of them runs, in the
processes of servers neither. Less than 85 % of the lines fails. It takes a quarter longer than `test`.
TEXT
}

help_check() {
    cat <<'TEXT'
Usage: ./build.sh check

Runs ruff format --check, ruff check, mypy --strict on backend_src, client, gateway, training, scripts and model_repository,
shellcheck and hadolint; on the gateway's page biome and the TypeScript compiler.
TEXT
}

help_clean() {
    cat <<'TEXT'
Usage: ./build.sh clean

Removes .venv, .cache, and what tests and tools left. Fetched checkpoints stay in Hugging Face's own cache.
TEXT
}

# --- setup ------------------------------------------------------------------------------------------------------------

# Prints "3.11" for a Python that runs, nothing otherwise (a version manager's shim may exist and not run).
python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

find_python() {
    local candidate version
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        version=$(python_version "$candidate")
        if [[ $version == 3.11 || $version == 3.12 ]]; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or 3.12, found ${PYTHON:-python3} $(python_version "${PYTHON:-python3}");" \
        "set PYTHON=/path/to/python3.12"
}

platform() {
    case ${OMNI_PLATFORM:-} in
        cpu | gpu) echo "$OMNI_PLATFORM" ;;
        '') if compgen -G '/dev/nvidia[0-9]*' >/dev/null; then echo gpu; else echo cpu; fi ;;
        *) fail "OMNI_PLATFORM must be cpu or gpu, not '$OMNI_PLATFORM'" ;;
    esac
}

need_disk() { # need_disk GIB
    local free
    free=$(df -Pk "$ROOT" | awk 'NR == 2 {print $4}')
    ((free >= $1 * 1024 * 1024)) || fail "needs $1 GiB of free disk under $ROOT, found $((free / 1024 / 1024)) GiB"
}

# step NAME COMMAND…: runs it quietly; tells how long it took, or the end of its output and that it failed.
step() {
    local name=$1 log=$LOGS/setup.log begin=$SECONDS
    shift
    printf 'setup: %s … ' "$name" >&2
    if "$@" >"$log" 2>&1; then
        say "$((SECONDS - begin)) s"
    else
        say "failed"
        tail -n 15 "$log" >&2
        fail "could not set up the $name (the whole output: $log)"
    fi
}

make_environment() {
    local python version
    if [[ -x $VENV/bin/python ]]; then
        version=$(python_version "$VENV/bin/python")
        [[ $version == 3.11 || $version == 3.12 ]] ||
            fail ".venv does not hold a working Python 3.11 or 3.12 (found '$version'); run ./build.sh clean"
        return
    fi
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv module; install it (on Debian and Ubuntu: the package python3-venv)"
    [[ $PLATFORM == gpu ]] || "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        fail "vLLM on a CPU needs libnuma.so.1; install it (on Debian and Ubuntu: the package libnuma1)"
    need_disk "$([[ $PLATFORM == gpu ]] && echo 24 || echo 4)"
    step "environment (Python $(python_version "$python"))" "$python" -m venv "$VENV"
}

make_uv() {
    local wanted
    wanted=$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' "$ROOT/requirements/uv.lock")
    [[ "$("$VENV/bin/uv" --version 2>/dev/null)" == "uv $wanted"* ]] ||
        step "uv $wanted" "$VENV/bin/python" -m pip install --disable-pip-version-check -r "$ROOT/requirements/uv.lock"
}

pip_config() { "$VENV/bin/python" -m pip config list 2>/dev/null | sed -n "s/^[^']*\.$1='\(.*\)'$/\1/p" | tail -n 1; }

# uv reads neither pip's settings nor its variables; a machine that has set pip up for a mirror means uv too.
use_pip_settings() {
    local index links
    index=$(pip_config index-url)
    links=$(pip_config find-links)
    if [[ -n $index && -z ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-} ]]; then export UV_DEFAULT_INDEX=$index; fi
    if [[ -n $links && -z ${UV_FIND_LINKS:-} ]]; then export UV_FIND_LINKS=${links// /,}; fi
}

# Prints what makes uv choose a CPU build of torch: PyPI's brings gigabytes of CUDA.
torch_backend() {
    local tag link links
    tag=cp$(python_version "$VENV/bin/python" | tr -d .)
    links=${UV_FIND_LINKS:-}
    for link in ${links//,/ }; do
        if compgen -G "${link#file://}/torch-*+cpu-$tag-*.whl" >/dev/null; then return; fi
    done
    if "$VENV/bin/python" -c 'import urllib.request as r; r.urlopen("https://download.pytorch.org/whl/cpu/", timeout=10)' \
        2>/dev/null; then
        echo --torch-backend=cpu
    else
        say "setup: download.pytorch.org cannot be reached; taking torch's CUDA build from the index instead (large)"
    fi
}

install_dependencies() {
    local -a overrides=(--override "$ROOT/requirements/overrides.txt") backend=()
    if [[ $PLATFORM == cpu ]]; then
        overrides+=(--override "$ROOT/requirements/overrides-cpu.txt")
        mapfile -t backend < <(torch_backend)
    fi
    step "dependencies ($PLATFORM)" "$VENV/bin/uv" pip install --python "$VENV/bin/python" \
        "${overrides[@]}" "${backend[@]}" -r "$ROOT/requirements/$PLATFORM.lock" -r "$ROOT/requirements/dev.lock"
    step "packages of this project" "$VENV/bin/uv" pip install --python "$VENV/bin/python" \
        --no-deps --no-build-isolation -e "$ROOT" -e "$ROOT/client" -e "$ROOT/gateway"
}

# The wheel is only the carrier: its binaries find their libraries by relative paths, so its layout is kept.
unpack_tritonserver() {
    local unpacked=$TRITON_HOME_DIR.new version
    version=$(python_version "$VENV/bin/python")
    rm -rf "$unpacked" "$TRITON_HOME_DIR"
    mkdir -p "$(dirname "$unpacked")"
    "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps --target "$unpacked" \
        -r "$ROOT/requirements/tritonserver.lock" || return 1
    find "$unpacked" -mindepth 1 -maxdepth 1 ! -name pytriton ! -name nvidia_pytriton.libs -exec rm -rf {} +
    find "$unpacked/pytriton" -mindepth 1 -maxdepth 1 ! -name tritonserver -exec rm -rf {} +
    chmod +x "$unpacked/pytriton/tritonserver/bin/tritonserver"
    install -m 755 "$unpacked/pytriton/tritonserver/python_backend_stubs/$version/triton_python_backend_stub" \
        "$unpacked/pytriton/tritonserver/backends/python/" || return 1
    mv "$unpacked" "$TRITON_HOME_DIR"
}

make_tritonserver() {
    if [[ -x $TRITON_HOME_DIR/pytriton/tritonserver/backends/python/triton_python_backend_stub ]] ||
        command -v tritonserver >/dev/null; then return; fi
    step "tritonserver" unpack_tritonserver
}

# Exports OMNI_MODEL as a folder; a hub id is fetched with the hub's own progress bar, nothing means training/mini.
make_checkpoint() {
    TRANSFORMERS_VERBOSITY=error child "$VENV/bin/python" -m triton_omni.supervisor.model_folder \
        ${OMNI_MODEL:+"$OMNI_MODEL"} >"$LOGS/checkpoint.out" || fail "no checkpoint to serve (see above)"
    OMNI_MODEL=$(<"$LOGS/checkpoint.out")
    export OMNI_MODEL
}

stamp() {
    cat "$ROOT"/requirements/{"$PLATFORM",dev,uv}.lock "$ROOT"/requirements/overrides*.txt "$ROOT/pyproject.toml" \
        "$ROOT"/{client,gateway}/pyproject.toml | sha256sum | cut -d ' ' -f 1
    echo "$PLATFORM $ROOT $(python_version "$VENV/bin/python")"
}

# Two commands started together set up once.
one_at_a_time() { # one_at_a_time COMMAND...
    exec 9>"$CACHE/setup.lock"
    flock 9
    "$@"
    exec 9>&-
}

make_everything() {
    make_environment
    if [[ "$(cat "$VENV/.setup-stamp" 2>/dev/null)" != "$(stamp)" ]]; then
        make_uv
        use_pip_settings
        install_dependencies
        stamp >"$VENV/.setup-stamp"
    fi
    make_tritonserver
    make_checkpoint
}

run_setup() {
    [[ $(uname -sm) == 'Linux x86_64' ]] || fail "needs Linux on x86_64, found $(uname -sm)"
    PLATFORM=$(platform)
    mkdir -p "$LOGS" || fail "cannot write in $ROOT"
    one_at_a_time make_everything
}

command_setup() {
    (($# == 0)) || fail "setup takes no argument, got '$1'; see ./build.sh setup --help"
    run_setup
    say "setup: ready ($PLATFORM, Python $(python_version "$VENV/bin/python"), checkpoint $OMNI_MODEL)"
}

# --- tools of the page's checks and tests -----------------------------------------------------------------------------

with_node() { PATH=$VENV/bin:$PATH "$@"; }

page_tools_stamp() { cat "$ROOT"/gateway/package-lock.json "$ROOT"/requirements/{page,deploy}.lock | sha256sum; }

# A package of npm brings Chromium and its libraries compressed, and unpacks them where TMPDIR says.
fetch_page_tools() (
    rm -rf "$PAGE_TOOLS"
    mkdir -p "$PAGE_TOOLS"
    cp "$ROOT"/gateway/package.json "$ROOT"/gateway/package-lock.json "$PAGE_TOOLS"
    "$VENV/bin/uv" pip install --python "$VENV/bin/python" -r "$ROOT/requirements/page.lock" \
        -r "$ROOT/requirements/deploy.lock" || exit
    cd "$PAGE_TOOLS" || exit
    with_node npm ci --ignore-scripts --no-audit --no-fund || exit
    with_node env TMPDIR="$PAGE_TOOLS" node --input-type=module --eval '
        import chromium, { inflate } from "@sparticuz/chromium";
        await chromium.executablePath();
        await inflate("node_modules/@sparticuz/chromium/bin/al2023.tar.br");' || exit
    rm -rf node_modules/@sparticuz
    page_tools_stamp >stamp
)

make_page_tools() {
    if [[ "$(cat "$PAGE_TOOLS/stamp" 2>/dev/null)" != "$(page_tools_stamp)" ]]; then
        need_disk 2
        use_pip_settings
        step "tools that check and test the page and deploy/" fetch_page_tools
    fi
}

# --- a tool of the server's tests -------------------------------------------------------------------------------------

# The wheel is only the carrier: its client is not the one that .venv has.
unpack_perf_analyzer() {
    local unpacked=$PERF_ANALYZER_DIR.new
    rm -rf "$unpacked" "$PERF_ANALYZER_DIR"
    "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps --target "$unpacked" \
        -r "$ROOT/requirements/perf_analyzer.lock" || return 1
    mkdir -p "$PERF_ANALYZER_DIR"
    mv "$unpacked/bin/perf_analyzer" "$PERF_ANALYZER_DIR" || return 1
    rm -rf "$unpacked"
    cp "$ROOT/requirements/perf_analyzer.lock" "$PERF_ANALYZER_DIR/stamp"
}

make_perf_analyzer() {
    if [[ -z ${PERF_ANALYZER:-} ]] &&
        ! cmp -s "$ROOT/requirements/perf_analyzer.lock" "$PERF_ANALYZER_DIR/stamp"; then
        use_pip_settings
        step "perf_analyzer" unpack_perf_analyzer
    fi
}

# --- clients of others, which tests run against the gateway -----------------------------------------------------------

clients_stamp() {
    cat "$ROOT/requirements/clients.lock" "$ROOT/tests/frameworks/package-lock.json" | sha256sum
    python_version "$VENV/bin/python"
}

# In an environment of their own: they ask for other versions than the server.
fetch_clients() (
    rm -rf "$CLIENTS"
    "$VENV/bin/uv" venv --python "$VENV/bin/python" "$CLIENTS" || exit
    "$VENV/bin/uv" pip install --python "$CLIENTS/bin/python" -r "$ROOT/requirements/clients.lock" || exit
    cp "$ROOT"/tests/frameworks/package.json "$ROOT"/tests/frameworks/package-lock.json "$CLIENTS"
    cd "$CLIENTS" || exit
    with_node npm ci --ignore-scripts --no-audit --no-fund || exit
    clients_stamp >stamp
)

make_clients() {
    if [[ "$(cat "$CLIENTS/stamp" 2>/dev/null)" != "$(clients_stamp)" ]]; then
        need_disk 2
        use_pip_settings
        step "clients that are tested against the gateway" fetch_clients
    fi
}

# --- serve and demo ---------------------------------------------------------------------------------------------------

command_serve() {
    run_setup
    child "$VENV/bin/python" -m triton_omni.supervisor.serve \
        --model-repository "$REPOSITORY" --model "$OMNI_MODEL" --log-file "$LOGS/server.log" "$@"
}

# Sets GRPC_URL and METRICS_URL from the READY line of the supervisor, or fails with what it said.
wait_for_ready() { # wait_for_ready FILE_DESCRIPTOR
    local ready=''
    until [[ $ready == 'READY '* ]]; do
        if ! read -r ready <&"$1"; then
            kill -0 "$SERVER" 2>/dev/null || fail "the server did not start (see above)"
            sleep 0.1
        fi
    done
    GRPC_URL=$(sed -n 's/.* grpc=\([^ ]*\).*/\1/p' <<<"$ready")
    METRICS_URL=http://$(sed -n 's/.* metrics=\([^ ]*\).*/\1/p' <<<"$ready")/metrics
}

# Serves on free loopback ports until this script ends; sets GRPC_URL and METRICS_URL.
start_server() { # start_server COMMAND
    local output out said
    # Without a name of its own: two that start at a time must not read each other's READY line.
    output=$(mktemp "$LOGS/$1.XXXXXX")
    exec {out}>"$output"
    exec {said}<"$output"
    rm "$output"
    # In a session of its own Ctrl-C does not reach it: the client goes first, and its request with it.
    setsid "$VENV/bin/python" -m triton_omni.supervisor.serve --model-repository "$REPOSITORY" --model "$OMNI_MODEL" \
        --log-file "$LOGS/$1-server.log" --http-port 0 --grpc-port 0 --metrics-port 0 >&"$out" &
    SERVER=$!
    CHILDREN+=("$SERVER")
    wait_for_ready "$said"
    exec {out}>&- {said}<&-
}

command_doctor() {
    run_setup
    child "$VENV/bin/python" -m triton_omni.doctor.cli "$@"
}

command_demo() {
    (($# <= 1)) || fail "demo takes one TEXT; put it in quotes"
    [[ ${1:-} != -?* ]] || fail "demo takes one TEXT and no option (got '$1')"
    run_setup
    # With a seed the same text is answered alike each time.
    set -- say "${1:-Tell me a story}" --seed 0 -o reply.wav --spectrogram reply.png
    # What would be refused is refused before a server takes its time to start.
    TRITON_OMNI_URL='' child "$VENV/bin/triton-omni" "$@" --check || exit
    start_server demo
    child "$VENV/bin/triton-omni" "$@" --url "$GRPC_URL"
}

# Whether the gateway with these options needs a server that we start.
gateway_needs_server() {
    local option
    for option in "$@"; do
        case $option in
            --url | --url=*) return 1 ;;
        esac
    done
}

command_gateway() {
    local status=0 gateway
    run_setup
    # What would be refused is refused before a server takes its time to start.
    "$VENV/bin/triton-omni-gateway" --check "$@" || exit
    if gateway_needs_server "$@"; then
        start_server gateway
        # That checkpoint knows no other words for it.
        [[ $OMNI_MODEL != "$ROOT/training/mini" ]] || set -- --speech-prompt 'Say: {input}' --window-seconds 5 "$@"
        set -- --url "$GRPC_URL" "$@"
    fi
    # In a session of its own Ctrl-C reaches this script alone, which ends the gateway and then its server.
    setsid "$VENV/bin/triton-omni-gateway" "$@" &
    gateway=$!
    CHILDREN+=("$gateway")
    wait -n || status=$?
    if kill -0 "$gateway" 2>/dev/null; then
        fail "the server has ended by itself (its log: $LOGS/gateway-server.log)"
    fi
    exit "$status"
}

# Whether `triton-omni bench` or `evaluate` with these options needs a server that we start.
measuring_needs_server() {
    local option
    for option in "$@"; do
        case $option in
            --url | --url=* | --from-profile-export* | --write-perf-analyzer-input* | --check | --help) return 1 ;;
        esac
    done
    [[ -z ${TRITON_OMNI_URL:-} ]]
}

command_bench() {
    [[ ${1:-} != micro ]] || export OMNI_MODEL=${OMNI_MODEL:-random:tiny}
    run_setup
    if [[ ${1:-} == micro || ${1:-} == compare ]]; then
        child "$VENV/bin/python" "$ROOT/scripts/$1" "${@:2}"
        return
    fi
    if measuring_needs_server "$@"; then
        # A mistyped option is told at once, not after a minute's start.
        "$VENV/bin/triton-omni" bench --check "$@"
        start_server bench
        set -- --url "$GRPC_URL" --metrics-url "$METRICS_URL" "$@"
    fi
    "$VENV/bin/triton-omni" bench "$@"
}

command_evaluate() {
    local options=()
    while (($# > 0)); do
        case $1 in
            --model) (($# > 1)) || fail "--model needs a checkpoint" && export OMNI_MODEL=$2 && shift ;;
            --model=*) export OMNI_MODEL=${1#*=} ;;
            *) options+=("$1") ;;
        esac
        shift
    done
    run_setup
    if measuring_needs_server "${options[@]}"; then
        "$VENV/bin/triton-omni" evaluate --check "${options[@]}"
        start_server evaluate
        options=(--url "$GRPC_URL" "${options[@]}")
    fi
    "$VENV/bin/triton-omni" evaluate "${options[@]}"
}

command_soak() {
    export OMNI_MODEL=${OMNI_MODEL:-random:tiny}
    run_setup
    child "$VENV/bin/python" "$ROOT/scripts/soak" "$@"
}

# --- check, test, clean -----------------------------------------------------------------------------------------------

run_checks() {
    cd "$ROOT"
    "$VENV/bin/ruff" format --check .
    "$VENV/bin/ruff" check .
    "$VENV/bin/mypy" --strict backend_src client gateway training
    "$VENV/bin/mypy" --strict scripts
    # The models' files share one module name, so each is a run of its own.
    printf '%s\0' model_repository/*/1/model.py | xargs -0 -n 1 -P "$(nproc)" "$VENV/bin/mypy" --strict
    with_node "$PAGE_TOOLS/node_modules/.bin/tsc" --project gateway
    with_node "$PAGE_TOOLS/node_modules/.bin/biome" check --error-on-warnings --config-path=gateway/page.biome.json \
        gateway/triton_omni_gateway/page gateway/page.biome.json gateway/tsconfig.json gateway/package.json tests/page \
        tests/frameworks/clients
    "$VENV/bin/shellcheck" build.sh scripts/*.sh examples/*.sh deploy/*.sh .ci/run
    "$VENV/bin/hadolint" Dockerfile
}

command_check() {
    (($# == 0)) || fail "check takes no argument, got '$1'; see ./build.sh check --help"
    run_setup
    one_at_a_time make_page_tools
    run_checks
}

# test_workers: how many there are. On a GPU one alone: vLLM's engines each take a share of its memory.
test_workers() {
    if [[ $(platform) == gpu ]] || (($(nproc) < 2)); then echo 1; else echo 4; fi
}

prepare_tests() {
    # Where it is set, every one of the many processes that tests start would compile its libraries anew.
    unset PYTHONDONTWRITEBYTECODE
    run_setup
    one_at_a_time make_page_tools
    one_at_a_time make_perf_analyzer
    one_at_a_time make_clients
}

# run_all_tests [PYTEST_ARGS]: four workers for two cores: one has a server, whose tests wait for the most part, and one
# takes what the others leave (see tests/conftest.py).
run_all_tests() {
    exec "$VENV/bin/python" -m pytest --numprocesses "$(test_workers)" --dist loadscope --no-loadscope-reorder "$@"
}

command_test() {
    prepare_tests
    if (($# > 0)); then
        exec "$VENV/bin/python" -m pytest "$@"
    fi
    run_checks
    run_all_tests
}

command_coverage() {
    (($# == 0)) || fail "coverage takes no argument, got '$1'; see ./build.sh coverage --help"
    prepare_tests
    run_all_tests --cov --cov-report=term-missing:skip-covered --cov-fail-under="$COVERAGE_FLOOR"
}

command_clean() {
    (($# == 0)) || fail "clean takes no argument, got '$1'; see ./build.sh clean --help"
    cd "$ROOT"
    rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.* .hypothesis build {client,gateway}/build
    find . -name .git -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -prune -exec rm -rf {} +
}

main() {
    local command=${1:-}
    end_on_signals
    case $command in
        '' | -h | --help | help) help_main ;;
        setup | demo | serve | gateway | doctor | bench | evaluate | soak | test | coverage | check | clean)
            shift
            if [[ ${1:-} == -h || ${1:-} == --help ]]; then "help_$command"; else "command_$command" "$@"; fi
            ;;
        *) fail "unknown command '$command'; ./build.sh --help lists them" ;;
    esac
}

main "$@"
