#!/usr/bin/env bash
# kcat: check.sh KCAT HOST:PORT
set -euo pipefail
kcat=$1 address=$2 run=$$-$RANDOM
topic=kcat-$run

ok() { printf 'ok %s\n' "$*"; }
same() { [ "$1" = "$2" ] || { printf 'expected %q, got %q\n' "$2" "$1" >&2; exit 1; }; }
limited() { timeout 60 "$kcat" -X broker.address.family=v4 "$@"; }

seq 1 100 | limited -P -b "$address" -t "$topic" -p 0
ok produce
same "$(limited -C -b "$address" -t "$topic" -p 0 -o beginning -e -q | tr '\n' ,)" "$(seq 1 100 | tr '\n' ,)"
ok consume

for codec in gzip snappy lz4 zstd; do
    limited -P -b "$address" -t "$topic-$codec" -p 0 -z "$codec" -k key -H "codec=$codec" < <(seq 1 50)
    same "$(limited -C -b "$address" -t "$topic-$codec" -p 0 -o 49 -c 1 -q -f '%k %s %h %o')" "key 50 codec=$codec 49"
done
ok compression, keys, headers

same "$(limited -C -b "$address" -t "$topic" -p 0 -o -10 -e -q | head -1)" 91
same "$(limited -Q -b "$address" -t "$topic:0:1" | tail -1)" "$topic [0] offset 0"
ok offsets

same "$(limited -b "$address" -G "group-$run" -o beginning -X auto.offset.reset=earliest -c 100 -q "$topic" 2>/dev/null | sort -n | tail -1)" 100
ok group

limited -L -b "$address" | grep -q "topic \"$topic\" with"
ok metadata
