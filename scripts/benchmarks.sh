#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the figures of docs/benchmarks.md on one NVIDIA GPU of 80 GB or more: `quality` and `look_ahead` on the
# checkpoint that OMNI_MODEL names, the others on random weights of the published sizes. `look_ahead` takes no GPU.
#
#   scripts/benchmarks.sh OUT [PART...]     every part, or those named, each into OUT/PART, which must not be there yet
#
# After `./build.sh setup`. A part takes two to forty minutes, `rules` and `apart` hours, `apart` two GPUs. `turns` needs BEFORE: another
# checkout, after `./build.sh setup` there.
# Exit code 1: a part failed; the others were measured. PYTHON: where the project is installed, instead of .venv. MODEL: instead
# of random weights. RUNS (3; 5 where a part says so): how often each load, stage alone, or start is measured. PRESETS
# ("reference fast"), SIZES ("7b 3b") and VARIANTS ("shipped no-claim"): a share of what is measured of presets, of `numbers` and `fp8`, of
# `apart`, `plans` and `rules`; `scripts/over_starts.py OUT/caches OTHER/caches` puts shares together.
set -euo pipefail

PARTS=(numbers served crowds rules plans fp8 small steps windows whole media triton prompts conversations speech listeners
    caches presets many realtime crowd_time apart quality look_ahead four_bit memory turns)
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}

compare() { # compare PART SIZE OPTIONS...: served variants, each request 100 tokens, 150 of text and 20 s of speech at most
    local part=$1 size=$2
    shift 2
    "$PYTHON" "$ROOT/scripts/compare" --out "$OUT/$part" --model "${MODEL:-random:$size}" --mps "$@" -- \
        --fixed-lengths --prompt-tokens 100 --system "" --max-tokens 150 --talker-max-tokens 1000
}

micro() { # micro PART SIZE OPTIONS...: stages alone, RUNS times
    local part=$1 size=$2 run
    shift 2
    mkdir -p "$OUT/${part%/*}"
    for ((run = 1; run <= ${RUNS:-3}; run++)); do
        "$PYTHON" "$ROOT/scripts/micro" --random-weights "$size" -o "$OUT/$part.$run.json" "$@" || return
    done
}

several() { # several --load|--variant NAME[=WHAT]...: adds each to `asked` RUNS times: as runs of one start, or as starts
    local option=$1 run each
    shift
    for ((run = 1; run <= ${RUNS:-3}; run++)); do
        for each in "$@"; do
            asked+=("$option" "${each%%=*}.$run${each#"${each%%=*}"}")
        done
    done
}

summary() { # summary PART: medians and ranges; figures for docs/gpu-runs into OUT/PART.json
    "$PYTHON" "$ROOT/scripts/over_starts.py" "$OUT/$1" -o "$OUT/$1.json"
}

ONE='one=--concurrency 1 --requests 8'
EIGHT='eight=--concurrency 8 --requests 32'
TOGETHER='together=--concurrency 32 --requests 96'
LISTENERS='listeners=--concurrency 32 --requests 96 --ramp-up 20 --listen'
BRIEF='--max-tokens 30 --talker-max-tokens 100'
LOW_LATENCY='low_latency={"token2wav": {"plan": "low_latency"}}'

listen() { # listen PLACES [REPLIES]: so many hear replies of 20 s: three each up to 128, or two each where that is more
    local replies=$((3 * $1))
    ((replies <= 128)) || replies=$(($1 > 64 ? 2 * $1 : 128))
    replies=${2:-$replies}
    echo "listeners-$1=--concurrency $1 --requests $replies --ramp-up 20 --listen --warm-up 0"
}

part_numbers() { # the ten numbers of docs/benchmarks.md, runs of each by one start of each size
    local size ones asked=()
    several --load "$ONE"
    ones=("${asked[@]}")
    several --load "$TOGETHER" "$LISTENERS"
    for size in ${SIZES:-7b 3b}; do
        "numbers_$size" || return
    done
    summary numbers
}

numbers_7b() {
    compare numbers/7b 7b --variant '7b={}' "${asked[@]}" &&
        micro numbers/alone/7b/steps 7b --only thinker,thinker-vllm --steps 60 &&
        micro numbers/alone/7b/window 7b --only token2wav-windows
}

numbers_3b() {
    compare numbers/3b 3b --variant "3b-$LOW_LATENCY" "${ones[@]}"
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

variants() { # variants PART LOADS...: those of `changes` that VARIANTS names, or all in `order`
    local part=$1 name chosen=() asked=()
    shift
    for name in ${VARIANTS:-$order}; do
        [[ -v "changes[$name]" ]] || { echo "VARIANTS: '$name' is none of those of $part: $order" >&2 && return 2; }
        chosen+=(--variant "$name=${changes[$name]}")
    done
    several --load "$@"
    compare "$part" 7b "${chosen[@]}" "${asked[@]}" && summary "$part"
}

SHARED=('one=--concurrency 1 --requests 8 --talker-max-tokens 100'
    'crowds=--concurrency 32 --requests 64 --crowds --talker-max-tokens 300' "$(listen 48 96)")

part_rules() { # each rule of a shared GPU switched off; five runs
    local order='shipped no-claim no-pause no-urgent-batch not-confined'
    local whole='{"engine": {"partition_percent": 0}}'
    local -A changes=([shipped]='{}' [no-claim]='{"token2wav": {"policy": {"claim_ms": 0}}}'
        [no-pause]='{"thinker": {"policy": {"pause_ms": 0, "pause_text_ms": 0}}}'
        [no-urgent-batch]='{"token2wav": {"policy": {"enough_sound_ms": 0}}}'
        [not-confined]="{\"thinker\": $whole, \"talker\": $whole}")
    RUNS=${RUNS:-5} variants rules "${SHARED[@]}"
}

part_plans() { # streaming plans; `more-context` is closer to the whole reply, and its chunks end earlier in their windows
    local order='shipped steady low_latency more-context'
    local -A changes=([shipped]='{}' [steady]='{"token2wav": {"plan": "steady"}}' [low_latency]="${LOW_LATENCY#*=}"
        [more-context]='{"token2wav": {"plans": {"balanced": {"vocoder_context_frames": 18}}}}')
    variants plans "${SHARED[@]}"
}

part_fp8() { # one stream of 6 s replies, 7B and 3B
    local size asked=() fp8='"thinker": {"quantization": "fp8"}' plan='"token2wav": {"plan": "low_latency"}'
    several --load 'one=--concurrency 1 --requests 8 --talker-max-tokens 300'
    for size in ${SIZES:-7b 3b}; do
        compare "fp8/$size" "$size" --variant "$size" --variant "$size-fp8={$fp8}" \
            --variant "$size-low_latency={$plan}" --variant "$size-fp8_low_latency={$fp8, $plan}" "${asked[@]}" || return
    done
    summary fp8
}

part_small() {
    compare small 3b --variant shipped --variant "$LOW_LATENCY" --load "$ONE" \
        --load "$EIGHT" --load "$TOGETHER" --load "$LISTENERS"
}

part_steps() {
    micro steps/7b/steady 7b --only thinker,thinker-vllm,talker --steps 60 &&
        micro steps/3b/steady 3b --only thinker,thinker-vllm,talker --steps 60 &&
        micro steps/7b/anew 7b --only thinker,thinker-vllm --steps 60 --no-steady-decode &&
        micro steps/7b/fp8 7b --only thinker,thinker-vllm --steps 60 --quantization fp8 && summary steps
}

part_windows() {
    micro windows/7b/windows 7b --only token2wav-windows && summary windows &&
        RUNS=1 micro windows/7b/others 7b --only token2wav-quality,token2wav-kernels,seeds
}

part_whole() {
    micro whole/whole 7b --only token2wav-offline,token2wav-offline-hf --repeats 3
}

part_media() {
    local photo="$OUT/media/photo.jpg" # 12 megapixels
    micro media/media 7b --only media,media-vllm &&
        "$PYTHON" -c "from PIL import Image; Image.effect_noise((4032, 3024), 64).convert('RGB').save('$photo')" &&
        compare media/photo 7b --variant shipped --load \
            "photo=--concurrency 1,8 --requests 16 --image '$photo' --prompt-tokens 15700 $BRIEF"
}

part_triton() {
    micro triton/triton 7b --only pipeline,served
}

part_prompts() { # first audio against the length of the prompt; together, with prompts of 220 tokens, five runs
    local length asked=() loads=()
    for length in 100 1000 8000 16000; do
        loads+=("prompt-$length=--concurrency 1 --requests 8 --prompt-tokens $length")
    done
    several --load "${loads[@]}"
    RUNS=${RUNS:-5} several --load 'together-220=--concurrency 32 --requests 96 --prompt-tokens 220'
    compare prompts 7b --variant shipped "${asked[@]}" && summary prompts
}

ROOM='"engine": {"kv_cache_tokens": 294912}' # 32 conversations of 8,400 tokens
CACHED="cached={\"thinker\": {$ROOM}, \"talker\": {$ROOM}}"
PLAIN="plain={\"thinker\": {\"prefix_caching\": false, $ROOM}, \"talker\": {\"prefix_caching\": false, $ROOM}}"

part_conversations() { # ten turns with two photos and ten seconds of sound; single requests of 6 s beside them
    local folder="$OUT/conversations" turns asked=()
    mkdir -p "$folder"
    "$PYTHON" -c "from PIL import Image; import numpy, soundfile; \
        Image.effect_noise((1024, 768), 64).convert('RGB').save('$folder/first.jpg'); \
        Image.effect_noise((1024, 768), 96).convert('RGB').save('$folder/second.jpg'); \
        soundfile.write('$folder/sound.wav', numpy.random.default_rng(0).normal(0, 0.1, 160000), 16000)" || return
    several --load 'one=--concurrency 1 --requests 4 --talker-max-tokens 300' \
        'together=--concurrency 32 --requests 64 --talker-max-tokens 300' \
        'crowd=--concurrency 32 --requests 64 --crowds --talker-max-tokens 300'
    turns="--conversation 10 --prompt-tokens 570 --max-tokens 30 --talker-max-tokens 150 --warm-up 1"
    turns="$turns --image '$folder/first.jpg' --image '$folder/second.jpg' --audio '$folder/sound.wav'"
    compare conversations/turns 7b --variant "$PLAIN" --variant "$CACHED" \
        "${asked[@]}" --load "alone=$turns --concurrency 1 --requests 3" \
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

part_caches() { # requests without a salt, with the caches and without, several starts
    local asked=() off='{"prefix_caching": false}' short='--talker-max-tokens 300'
    several --variant "plain={\"thinker\": $off, \"talker\": $off}" shipped
    compare caches 7b "${asked[@]}" --load "one.1=--concurrency 1 --requests 10 $short" \
        --load "one.2=--concurrency 1 --requests 10 $short" --load "together.1=--concurrency 32 --requests 32 $short" &&
        summary caches
}

presets() { # presets PART STAGES TOKEN2WAV LOADS...: the loads of each preset; three parts have 1 to 128 listeners
    local part=$1 stages=$2 streams=$3 preset asked=()
    shift 3
    for preset in ${PRESETS:-reference fast}; do
        asked+=(--variant "$preset={$stages \"token2wav\": {$streams \"plan\": \"balanced\", \"preset\": \"$preset\"}}")
    done
    several --load "$@"
    compare "$part" 7b "${asked[@]}" && summary "$part"
}

part_listeners() { # few listeners
    presets listeners '' '' "$(listen 1)" "$(listen 4)" "$(listen 8)" "$(listen 16)"
}

part_presets() { # evaluations of the flow against listeners that hear no gap
    presets presets '' '' "$TOGETHER" "$(listen 32)" "$(listen 48)" "$(listen 64)"
}

CROWD='{"max_sessions": 128, "engine": {"max_num_seqs": 128, "kv_cache_tokens": 262208}}' # room for 128 streams

part_many() { # the same with room for 128 streams
    presets many "\"thinker\": $CROWD, \"talker\": $CROWD," '"max_streams": 128,' "$(listen 96)" "$(listen 128)"
}

part_realtime() { # sessions of a gateway before a server, 1 and 32
    mkdir -p "$OUT/realtime"
    "$PYTHON" "$ROOT/scripts/realtime_served.py" --model "${MODEL:-random:7b}" --mps --runs "${RUNS:-3}" \
        -o "$OUT/realtime/realtime.json"
}

part_crowd_time() { # where each stage's time goes with 32 and 48 listeners of replies of 20 s
    mkdir -p "$OUT/crowd_time"
    compare crowd_time/served 7b --variant shipped --load "$(listen 32)" --load "$(listen 48)" &&
        "$PYTHON" "$ROOT/scripts/stage_time.py" "$OUT"/crowd_time/served/shipped/listeners-{32,48}.json |
        tee "$OUT/crowd_time/stage_time.md"
}

part_apart() { # one GPU, alone and after Envoy, token2wav on another one, two replicas: for each preset
    local room="\"thinker\": $CROWD, \"talker\": $CROWD" streams='"max_streams": 128'
    local preset variant own places loads=("$ONE" "$TOGETHER") asked=()
    for variant in ${VARIANTS:-shipped with-envoy apart replicas}; do
        case $variant in
            shipped) own= ;;
            with-envoy) own=', "balancer": true' ;;
            apart) own=', "gpus": "token2wav=1"' ;;
            replicas) own=', "replicas": 2' ;;
            *) echo "VARIANTS: '$variant' is none of apart's: shipped with-envoy apart replicas" >&2 && return 2 ;;
        esac
        for preset in ${PRESETS:-reference fast}; do
            asked+=(--variant "$variant-$preset={$room, \"token2wav\": {$streams, \"preset\": \"$preset\"}$own}")
        done
    done
    for places in 32 48 64 96 128; do
        loads+=("$(listen "$places")")
    done
    several --load "${loads[@]}"
    compare apart 7b "${asked[@]}" && summary apart
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

part_look_ahead() { # codes of look-ahead, and frames of vocoder context, against whole replies of OMNI_MODEL in float32
    local each plan variants=()
    for each in 7-12 9-12 6-12 7-14 12-24; do
        plan="{\"look_ahead_codes\": ${each%-*}, \"vocoder_context_frames\": ${each#*-}}"
        variants+=(--variant "$each={\"token2wav\": {\"dtype\": \"float32\", \"plans\": {\"balanced\": $plan}}}")
    done
    "$PYTHON" "$ROOT/scripts/compare" --evaluate --out "$OUT/look_ahead" "${variants[@]}" -- \
        --sentences 24 --prompts 0 --pictures 0 --sounds 0 --seeds 5
}

part_four_bit() { # the thinker's decoder in 4 bits beside bfloat16, alone and served
    local asked=()
    several --load "$ONE" "$TOGETHER"
    micro four_bit/alone/plain 7b --only thinker --steps 60 &&
        micro four_bit/alone/awq 7b-awq --only thinker,thinker-vllm --steps 60 &&
        micro four_bit/alone/gptq 7b-gptq --only thinker --steps 60 &&
        compare four_bit/served 7b-awq --variant 7b-awq "${asked[@]}" && summary four_bit
}

memory() { # memory SIZE GIB VARIANT: starts where so much is free, and the largest photo that `small` takes
    local asked=()
    several --variant "$3"
    compare "memory/${3%%=*}" "$1" --memory "$2" "${asked[@]}" --load "$ONE" --load "$EIGHT" --load \
        "photo=--concurrency 1 --requests 4 --image '$OUT/memory/photo.jpg' --prompt-tokens 7800 $BRIEF"
}

part_memory() { # 7B as shipped, which needs less than 70 GiB, and the profile `small` where no more memory is free
    local failed=0
    mkdir -p "$OUT/memory"
    "$PYTHON" -c "from PIL import Image; \
        Image.effect_noise((2688, 2240), 64).convert('RGB').save('$OUT/memory/photo.jpg')" || return
    memory 7b 70 shipped-7b || failed=1
    memory 7b-awq 22 'small-7b={"profile": "small"}' || failed=1
    memory 3b 20 'small-3b={"profile": "small"}' || failed=1
    summary memory || failed=1
    return "$failed"
}

part_turns() { # this checkout and the one in BEFORE, each served several times
    [[ -n ${BEFORE:-} ]] || {
        echo "turns: BEFORE is not set: set it to another checkout, after ./build.sh setup there" >&2 && return 1
    }
    local asked=()
    several --variant "before={\"checkout\": \"$BEFORE\"}" now
    compare turns 7b "${asked[@]}" --load "$ONE" --load "$TOGETHER" --load "$LISTENERS" \
        --load 'crowds=--concurrency 32 --requests 128 --crowds --talker-max-tokens 300' && summary turns
}

usage() {
    sed -n '3,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
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
    [[ ${RUNS:-3} =~ ^[1-9][0-9]*$ ]] || { echo "RUNS: '$RUNS' is no number of runs, such as 3" >&2 && exit 2; }
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
