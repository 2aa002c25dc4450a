#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the figures of docs/benchmarks.md on one NVIDIA GPU of 80 GB or more: `quality` on the checkpoint that OMNI_MODEL
# names, the others on random weights of the published sizes.
#
#   scripts/benchmarks.sh OUT [PART...]     every part, or those named, each into OUT/PART, which must not be there yet
#
# After `./build.sh setup`. A part takes two to ten minutes, `numbers`, `listeners`, `caches`, `apart` and `turns` longer.
# `apart` needs two GPUs, `turns` BEFORE: another checkout, after `./build.sh setup` there.
# Exit code 1: a part failed; the others were measured. PYTHON: where the project is installed, instead of .venv. MODEL: instead
# of random weights. STARTS ("1 2 3"), PRESETS ("reference fast") and SIZES ("7b 3b"): a share of `caches` and
# `turns`, of `presets` and `many`, of `fp8`; `scripts/over_starts.py OUT/caches OTHER/caches` puts shares together.
set -euo pipefail

PARTS=(numbers served crowds rules plans fp8 small steps windows whole media triton prompts conversations speech listeners
    caches presets many realtime crowd_time apart quality four_bit memory turns)
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}

compare() { # compare PART SIZE OPTIONS...: served variants, each request 100 tokens, 150 of text and 20 s of speech at most
    local part=$1 size=$2
    shift 2
    "$PYTHON" "$ROOT/scripts/compare" --out "$OUT/$part" --model "${MODEL:-random:$size}" --mps "$@" -- \
        --fixed-lengths --prompt-tokens 100 --system "" --max-tokens 150 --talker-max-tokens 1000
}

micro() { # micro PART SIZE OPTIONS...: stages alone
    local part=$1 size=$2
    shift 2
    mkdir -p "$OUT/${part%/*}"
    "$PYTHON" "$ROOT/scripts/micro" --random-weights "$size" -o "$OUT/$part.json" "$@"
}

ONE='one=--concurrency 1 --requests 8'
EIGHT='eight=--concurrency 8 --requests 32'
TOGETHER='together=--concurrency 32 --requests 96'
LISTENERS='listeners=--concurrency 32 --requests 96 --ramp-up 20 --listen'
LOW_LATENCY='low_latency={"token2wav": {"plan": "low_latency"}}'

part_numbers() { # the ten numbers of docs/benchmarks.md, three runs of each by one start
    local run loads=() ones=()
    for run in 1 2 3; do
        ones+=(--load "one.$run=--concurrency 1 --requests 8")
        loads+=(--load "together.$run=--concurrency 32 --requests 96"
            --load "listeners.$run=--concurrency 32 --requests 96 --ramp-up 20 --listen")
    done
    compare numbers/7b 7b --variant '7b={}' "${ones[@]}" "${loads[@]}" || return
    for run in 1 2 3; do
        micro "numbers/alone/7b/steps.$run" 7b --only thinker,thinker-vllm --steps 60 &&
            micro "numbers/alone/7b/window.$run" 7b --only token2wav-windows || return
    done
    compare numbers/3b 3b --variant "3b-$LOW_LATENCY" "${ones[@]}" &&
        "$PYTHON" "$ROOT/scripts/over_starts.py" "$OUT/numbers" -o "$OUT/numbers.json"
}

part_served() {
    compare served 7b --variant shipped --load 'first=--concurrency 1 --requests 3 --warm-up 0' --load "$ONE" \
        --load "$EIGHT" --load "$TOGETHER" --load 'after=--concurrency 32 --requests 96 --ramp-up 8' --load "$LISTENERS" \
        --load 'text=--concurrency 1,32 --requests 64 --text-only'
}

part_crowds() { # replies of 6 s
    compare crowds 7b --variant shipped --variant "$LOW_LATENCY" \
        --load 'eight=--concurrency 8 --requests 64 --crowds --talker-max-tokens 300' \
        --load 'crowds=--concurrency 32 --requests 128 --crowds --talker-max-tokens 300'
}

part_rules() { # each rule of a shared GPU switched off, measured five times
    local run loads=()
    for run in 1 2 3 4 5; do
        loads+=(--load "one-$run=--concurrency 1 --requests 3 --talker-max-tokens 60"
            --load "together-$run=--concurrency 32 --requests 48 --talker-max-tokens 300")
    done
    compare rules 7b --variant shipped --variant 'no-claim={"token2wav": {"policy": {"claim_ms": 0}}}' \
        --variant 'no-pause={"thinker": {"policy": {"pause_ms": 0, "pause_text_ms": 0}}}' \
        --variant 'no-gathering={"token2wav": {"policy": {"gather_ms": 0}}}' \
        --variant 'no-urgent-batch={"token2wav": {"policy": {"enough_sound_ms": 0}}}' "${loads[@]}"
}

part_plans() {
    compare plans 7b --variant 'steady={"token2wav": {"plan": "steady"}}' \
        --variant "$LOW_LATENCY" --load "$ONE" --load "$TOGETHER" --load "$LISTENERS"
}

part_fp8() { # one stream of 6 s replies three times, 7B and 3B
    local size run variants=() loads=() fp8='"thinker": {"quantization": "fp8"}'
    variants=(--variant shipped --variant "fp8={$fp8}" --variant "$LOW_LATENCY"
        --variant "fp8_low_latency={$fp8, \"token2wav\": {\"plan\": \"low_latency\"}}")
    for run in 1 2 3; do
        loads+=(--load "one.$run=--concurrency 1 --requests 8 --talker-max-tokens 300")
    done
    for size in ${SIZES:-7b 3b}; do
        compare "fp8/$size" "$size" "${variants[@]}" "${loads[@]}" &&
            "$PYTHON" "$ROOT/scripts/over_starts.py" "$OUT/fp8/$size" || return
    done
}

part_small() {
    compare small 3b --variant shipped --variant "$LOW_LATENCY" --load "$ONE" \
        --load "$EIGHT" --load "$TOGETHER" --load "$LISTENERS"
}

part_steps() {
    micro steps/steady 7b --only thinker,thinker-vllm,talker --steps 60 &&
        micro steps/small 3b --only thinker,thinker-vllm,talker --steps 60 &&
        micro steps/anew 7b --only thinker,thinker-vllm --steps 60 --no-steady-decode &&
        micro steps/fp8 7b --only thinker,thinker-vllm --steps 60 --quantization fp8
}

part_windows() {
    micro windows/windows 7b --only token2wav-windows,token2wav-quality,token2wav-kernels,seeds
}

part_whole() {
    micro whole/whole 7b --only token2wav-offline,token2wav-offline-hf --repeats 3
}

part_media() {
    local photo="$OUT/media/photo.jpg" # 12 megapixels
    micro media/media 7b --only media,media-vllm &&
        "$PYTHON" -c "from PIL import Image; Image.effect_noise((4032, 3024), 64).convert('RGB').save('$photo')" &&
        compare media/photo 7b --variant shipped --load \
            "photo=--concurrency 1,8 --requests 16 --image '$photo' --max-tokens 30 --talker-max-tokens 100"
}

part_triton() {
    micro triton/triton 7b --only pipeline,served
}

part_prompts() { # first audio against the length of the prompt
    compare prompts 7b --variant shipped --load '100=--concurrency 1 --requests 8' \
        --load '1k=--concurrency 1 --requests 8 --prompt-tokens 1000' \
        --load '8k=--concurrency 1 --requests 8 --prompt-tokens 8000' \
        --load '16k=--concurrency 1 --requests 8 --prompt-tokens 16000'
}

ROOM='"engine": {"kv_cache_tokens": 294912}' # 32 conversations of 8,400 tokens
CACHED="cached={\"thinker\": {$ROOM}, \"talker\": {$ROOM}}"
PLAIN="plain={\"thinker\": {\"prefix_caching\": false, $ROOM}, \"talker\": {\"prefix_caching\": false, $ROOM}}"

part_conversations() { # ten turns with two photos and ten seconds of sound; single requests of 6 s beside them
    local folder="$OUT/conversations" turns run loads=()
    mkdir -p "$folder"
    "$PYTHON" -c "from PIL import Image; import numpy, soundfile; \
        Image.effect_noise((1024, 768), 64).convert('RGB').save('$folder/first.jpg'); \
        Image.effect_noise((1024, 768), 96).convert('RGB').save('$folder/second.jpg'); \
        soundfile.write('$folder/sound.wav', numpy.random.default_rng(0).normal(0, 0.1, 160000), 16000)" || return
    for run in 1 2 3; do
        loads+=(--load "one-$run=--concurrency 1 --requests 4 --talker-max-tokens 300"
            --load "together-$run=--concurrency 32 --requests 64 --talker-max-tokens 300"
            --load "crowd-$run=--concurrency 32 --requests 64 --crowds --talker-max-tokens 300")
    done
    turns="--conversation 10 --prompt-tokens 570 --max-tokens 30 --talker-max-tokens 150 --warm-up 1"
    turns="$turns --image '$folder/first.jpg' --image '$folder/second.jpg' --audio '$folder/sound.wav'"
    compare conversations/turns 7b --variant "$PLAIN" --variant "$CACHED" \
        "${loads[@]}" --load "alone=$turns --concurrency 1 --requests 3" \
        --load "many=$turns --concurrency 32 --requests 32 --ramp-up 10 --listen"
}

part_speech() { # questions of 2 and 30 s, sent whole and while they are spoken
    local folder="$OUT/speech" turns="--conversation 2 --concurrency 1 --requests 4" length loads=()
    mkdir -p "$folder"
    for length in 2 30; do
        "$PYTHON" -c "import numpy, soundfile; \
            soundfile.write('$folder/${length}s.wav', numpy.random.default_rng(0).normal(0, 0.1, 16000 * $length), 16000)" ||
            return
        echo "[{\"audio\": [\"${length}s.wav\"]}, {\"audio\": [\"$((32 - length))s.wav\"]}]" >"$folder/${length}s.json"
    done
    for length in 2 30; do
        loads+=(--load "whole-$length=$turns --script '$folder/${length}s.json' --warm-up 1"
            --load "spoken-$length=$turns --script '$folder/${length}s.json' --warm-up 0 --speak")
    done
    "$PYTHON" "$ROOT/scripts/compare" --out "$folder/out" --model random:7b --mps --variant "$CACHED" "${loads[@]}" -- \
        --fixed-lengths --system "" --max-tokens 30 --talker-max-tokens 100
}

part_listeners() { # first audio against the number of listeners, who hear replies of 6 s
    local places loads=()
    for places in 1 4 8 16 32 48 64; do
        loads+=(--load "listeners-$places=--concurrency $places --requests $((3 * places + 2)) --talker-max-tokens 300")
    done
    compare listeners 7b --variant 'shipped={"bench": "--ramp-up 6 --listen --warm-up 0"}' "${loads[@]}"
}

part_caches() { # requests without a salt, with the caches and without, each served several times
    local start variants=() off='{"prefix_caching": false}' short='--talker-max-tokens 300'
    for start in ${STARTS:-1 2 3}; do
        variants+=(--variant "plain.$start={\"thinker\": $off, \"talker\": $off}" --variant "shipped.$start")
    done
    compare caches 7b "${variants[@]}" --load "one.1=--concurrency 1 --requests 10 $short" \
        --load "one.2=--concurrency 1 --requests 10 $short" --load "together.1=--concurrency 32 --requests 32 $short" &&
        "$PYTHON" "$ROOT/scripts/over_starts.py" "$OUT/caches"
}

listeners() { # listeners PLACES...: adds to `loads` so many who hear replies of 20 s
    local places
    for places in "$@"; do
        loads+=(--load "listeners-$places=--concurrency $places --requests $((2 * places)) --ramp-up 20 --listen --warm-up 0")
    done
}

presets() { # presets PART STAGES TOKEN2WAV PLACES...: listeners of replies of 20 s, for each preset
    local part=$1 stages=$2 streams=$3 preset variants=() loads=()
    shift 3
    for preset in ${PRESETS:-reference fast}; do
        variants+=(--variant "$preset={$stages \"token2wav\": {$streams \"plan\": \"balanced\", \"preset\": \"$preset\"}}")
    done
    listeners "$@"
    compare "$part" 7b "${variants[@]}" --load 'together=--concurrency 32 --requests 64' "${loads[@]}" &&
        "$PYTHON" "$ROOT/scripts/over_starts.py" "$OUT/$part"
}

part_presets() { # evaluations of the flow against listeners that hear no gap
    presets presets '' '' 32 48 64
}

CROWD='{"max_sessions": 128, "engine": {"max_num_seqs": 128, "kv_cache_tokens": 262208}}' # room for 128 streams

part_many() { # the same with room for 128 streams
    presets many "\"thinker\": $CROWD, \"talker\": $CROWD," '"max_streams": 128,' 96 128
}

part_realtime() { # sessions of a gateway before a server, 1 and 32
    mkdir -p "$OUT/realtime"
    "$PYTHON" "$ROOT/scripts/realtime_served.py" --model "${MODEL:-random:7b}" --mps -o "$OUT/realtime/realtime.json"
}

part_crowd_time() { # where each stage's time goes with 32 and 48 listeners of replies of 6 s
    local places loads=() reports=()
    mkdir -p "$OUT/crowd_time"
    for places in 32 48; do
        loads+=(--load "listeners-$places=--concurrency $places --requests $((3 * places + 2)) --talker-max-tokens 300")
        reports+=("$OUT/crowd_time/served/shipped/listeners-$places.json")
    done
    compare crowd_time/served 7b --variant 'shipped={"bench": "--ramp-up 6 --listen --warm-up 0"}' "${loads[@]}" &&
        "$PYTHON" "$ROOT/scripts/stage_time.py" "${reports[@]}" | tee "$OUT/crowd_time/stage_time.md"
}

part_apart() { # one GPU, token2wav on another one, two replicas
    local room="\"thinker\": $CROWD, \"talker\": $CROWD, \"token2wav\": {\"max_streams\": 128}"
    local loads=(--load "$ONE" --load "$TOGETHER")
    listeners 64 96 128
    compare apart 7b --variant "shipped={$room}" --variant "apart={$room, \"gpus\": \"token2wav=1\"}" \
        --variant "replicas={$room, \"replicas\": 2}" "${loads[@]}" &&
        "$PYTHON" "$ROOT/scripts/over_starts.py" "$OUT/apart"
}

part_quality() { # plans, presets, solvers and precisions of OMNI_MODEL against whole replies at ten points in float32
    local wanted flow='"diffusion": {"solver": "rk4", "num_steps": 10}' variants=()
    for wanted in balanced-float32 low_latency-float32 balanced-float16; do
        variants+=(--variant "$wanted={\"token2wav\": {\"plan\": \"${wanted%-*}\", \"dtype\": \"${wanted#*-}\", $flow}}")
    done
    "$PYTHON" "$ROOT/scripts/compare" --evaluate --out "$OUT/quality" "${variants[@]}" -- \
        --sentences 20 --prompts 4 --pictures 0 --sounds 0 --seeds 3 \
        --setting 'offline={"token2wav": {"mode": "offline"}}' --setting 'reference={"token2wav": {"preset": "reference"}}' \
        --setting 'fast={"token2wav": {"preset": "fast"}}' --setting 'rk4-6={"token2wav": {"num_steps": 6}}' \
        --setting 'euler-21={"token2wav": {"solver": "euler", "num_steps": 21}}' \
        --setting 'euler-10={"token2wav": {"solver": "euler", "num_steps": 10}}'
}

part_four_bit() { # the thinker's decoder in 4 bits beside bfloat16, alone and served
    micro four_bit/plain 7b --only thinker --steps 60 &&
        micro four_bit/awq 7b-awq --only thinker,thinker-vllm --steps 60 &&
        micro four_bit/gptq 7b-gptq --only thinker --steps 60 &&
        compare four_bit/served 7b-awq --variant shipped --load "$ONE" --load "$TOGETHER"
}

part_memory() { # the profile `small` where no more memory is free, and the largest photo that it takes
    local photo="$OUT/memory/photo.jpg" failed=0
    mkdir -p "$OUT/memory"
    "$PYTHON" -c "from PIL import Image; Image.effect_noise((2688, 2240), 64).convert('RGB').save('$photo')" || return
    set -- --variant 'small={"profile": "small"}' --load "$ONE" --load "$EIGHT" --load \
        "photo=--concurrency 1 --requests 4 --image '$photo' --max-tokens 30 --talker-max-tokens 100"
    compare memory/7b 7b-awq --memory 22 "$@" || failed=1
    compare memory/3b 3b --memory 20 "$@" || failed=1
    return "$failed"
}

part_turns() { # this checkout and the one in BEFORE, each served several times
    [[ -n ${BEFORE:-} ]] || {
        echo "turns: BEFORE is not set: set it to another checkout, after ./build.sh setup there" >&2 && return 1
    }
    local start variants=()
    for start in ${STARTS:-1 2 3}; do
        variants+=(--variant "before.$start={\"checkout\": \"$BEFORE\"}" --variant "now.$start")
    done
    compare turns 7b "${variants[@]}" --load "$ONE" --load "$TOGETHER" --load "$LISTENERS" \
        --load 'crowds=--concurrency 32 --requests 128 --crowds --talker-max-tokens 300' &&
        "$PYTHON" "$ROOT/scripts/over_starts.py" "$OUT/turns"
}

usage() {
    sed -n '3,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    echo "Parts: ${PARTS[*]}"
}

main() {
    case ${1:-} in
        "" | -h | --help) usage && exit ;;
    esac
    OUT=$1
    shift
    (($# > 0)) || set -- "${PARTS[@]}"
    local part
    for part in "$@"; do
        [[ " ${PARTS[*]} " == *" $part "* ]] || { echo "no part is named '$part': ${PARTS[*]}" >&2 && exit 2; }
        [[ ! -e $OUT/$part ]] || { echo "$OUT/$part exists already" >&2 && exit 2; }
    done
    mkdir -p "$OUT"
    OUT=$(cd "$OUT" && pwd)
    local failed=()
    for part in "$@"; do
        "part_$part" || failed+=("$part")
    done
    ((${#failed[@]} == 0)) || { echo "not all measured: ${failed[*]}" >&2 && exit 1; }
}

main "$@"
