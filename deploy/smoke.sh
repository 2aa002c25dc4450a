#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Whether an image, or a server that runs here, does what it should, from READY to its stop. Builds and fetches nothing.
#
#   deploy/smoke.sh image IMAGE [OPTIONS of docker run]     starts IMAGE with random weights of the tiny size; this
#                                                           project's needs a GPU: image triton-omni --gpus all
#   deploy/smoke.sh server PID HTTP GRPC                    PID is the supervisor's, or of the command that started it,
#                                                           and is stopped at the end; HTTP and GRPC are HOST:PORT
#
# Environment: SMOKE_READY_S (600), SMOKE_REVIVED_S (300), SMOKE_STOP_S (10), SMOKE_STAGE (token2wav)
set -euo pipefail

READY_S=${SMOKE_READY_S:-600}
REVIVED_S=${SMOKE_REVIVED_S:-300}
STOP_S=${SMOKE_STOP_S:-10}
STAGE=${SMOKE_STAGE:-token2wav}
MODE=${1:-}
SECOND_OF_SPEECH=48000 # bytes: 24 kHz, 16 bits

CONTAINER=''
SUPERVISOR=1
HTTP=127.0.0.1:8000
GRPC=127.0.0.1:8001

passed() { printf 'ok    %s\n' "$*"; }

fail() {
    printf 'FAIL  %s\n' "$*" >&2
    if [[ -n $CONTAINER ]]; then docker logs --tail 30 "$CONTAINER" >&2 || true; fi
    exit 1
}

# Where the server runs: in the container, or here.
inside() {
    if [[ -n $CONTAINER ]]; then docker exec "$CONTAINER" "$@"; else "$@"; fi
}

remove_container() {
    if [[ -n $CONTAINER ]]; then docker rm -f -v "$CONTAINER" >/dev/null 2>&1 || true; fi
}

start_image() { # start_image IMAGE [OPTIONS]
    local image=$1
    shift
    CONTAINER=$(docker run --detach --read-only --tmpfs /tmp --shm-size 1g --cap-drop ALL \
        --security-opt no-new-privileges -e OMNI_MODEL=random:tiny "$@" "$image")
    trap remove_container EXIT
}

is_ready() { inside triton-omni ready --url "$GRPC" >/dev/null 2>&1; }

await_ready() { # await_ready SECONDS WHAT
    local end=$((SECONDS + $1))
    until is_ready; do
        if [[ -n $CONTAINER && $(docker inspect -f '{{.State.Running}}' "$CONTAINER") != true ]]; then
            fail "$2: the container has ended"
        fi
        ((SECONDS < end)) || fail "$2: not within $1 s"
        sleep 0.5
    done
}

# Bytes of a reply's WAV file; the same request always, so the same number.
ask() { # ask URL
    inside triton-omni say "Tell me a story" --seed 7 --timeout 120 --url "$1" -o - 2>/dev/null | wc -c
}

check_replies() { # check_replies WHEN
    local by_http by_grpc
    by_http=$(ask "http://$HTTP") || fail "$1: no reply over HTTP"
    by_grpc=$(ask "$GRPC") || fail "$1: no reply over gRPC"
    [[ $by_http == "$by_grpc" ]] || fail "$1: $by_http bytes of speech over HTTP, $by_grpc over gRPC"
    ((by_http > SECOND_OF_SPEECH / 10)) || fail "$1: $by_http bytes are no speech"
    passed "$1: $by_http bytes of speech over HTTP and over gRPC"
}

check_confinement() {
    local user
    user=$(inside id -u)
    [[ $user != 0 ]] || fail "the server runs as root"
    passed "the server runs as user $user"
    if inside touch /probe 2>/dev/null; then fail "the root file system can be written"; fi
    passed "the root file system is read-only"
}

# The process of a stage: a child of tritonserver, which is a child of the supervisor.
stage_process() {
    # shellcheck disable=SC2016 # expanded by the shell that is started
    inside bash -c '
        find_stage() {
            local child
            for child in $(cat /proc/"$1"/task/*/children 2>/dev/null); do
                if tr "\0" " " </proc/"$child"/cmdline | grep -q "/$2/1/model.py"; then echo "$child"; fi
                find_stage "$child" "$2"
            done
        }
        find_stage "$@"' bash "$SUPERVISOR" "$STAGE"
}

check_restart() {
    local process begin=$SECONDS
    process=$(stage_process)
    [[ $process =~ ^[0-9]+$ ]] || fail "found no process of $STAGE ('$process')"
    inside bash -c "kill -KILL $process"
    while is_ready; do
        ((SECONDS < begin + 30)) || fail "$STAGE was killed and the server still calls itself ready"
        sleep 0.05
    done
    await_ready "$REVIVED_S" "$STAGE started again"
    [[ $(stage_process) != "$process" ]] || fail "$STAGE has the process that was killed"
    passed "$STAGE was killed, and started again within $((SECONDS - begin)) s"
}

stop_and_wait() {
    if [[ -n $CONTAINER ]]; then
        docker stop --time 60 "$CONTAINER" >/dev/null
        return
    fi
    kill -TERM "$SUPERVISOR"
    # It may be another's child, which only its parent can collect.
    while [[ -e /proc/$SUPERVISOR && $(awk '/^State:/ {print $2}' "/proc/$SUPERVISOR/status" 2>/dev/null) != Z ]]; do
        sleep 0.05
    done
}

check_stop() {
    local begin=$SECONDS code=143
    stop_and_wait
    ((SECONDS - begin <= STOP_S)) || fail "the stop took $((SECONDS - begin)) s"
    if [[ -n $CONTAINER ]]; then code=$(docker inspect -f '{{.State.ExitCode}}' "$CONTAINER"); fi
    [[ $code == 143 ]] || fail "the stop ended with code $code instead of 143"
    passed "stopped within $((SECONDS - begin)) s"
}

case $MODE in
    image)
        (($# >= 2)) || fail "usage: $0 image IMAGE [OPTIONS of docker run]"
        start_image "${@:2}"
        await_ready "$READY_S" "the first start"
        passed "ready within $SECONDS s"
        check_confinement
        ;;
    server)
        (($# == 4)) || fail "usage: $0 server PID HTTP GRPC"
        SUPERVISOR=$2 HTTP=$3 GRPC=$4
        await_ready "$READY_S" "the server"
        passed "ready"
        ;;
    *) fail "usage: $0 image IMAGE [OPTIONS of docker run], or $0 server PID HTTP GRPC" ;;
esac
check_replies "first"
check_restart
check_replies "afterwards"
check_stop
