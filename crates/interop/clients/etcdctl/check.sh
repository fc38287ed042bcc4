#!/usr/bin/env bash
# etcdctl: check.sh ETCDCTL HOST:PORT,…
set -euo pipefail
export ETCDCTL_API=3
etcdctl=$1 endpoints=$2 run=etcdctl-$$-$RANDOM
home=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$home"' EXIT

ok() { printf 'ok %s\n' "$*"; }
same() { [ "$1" = "$2" ] || { printf 'expected %q, got %q (line %s)\n' "$2" "$1" "${BASH_LINENO[0]}" >&2; exit 1; }; }
ctl() { timeout 120 "$etcdctl" --endpoints="$endpoints" "$@"; }
field() { python3 -c "import json,sys; d=json.load(sys.stdin); d=d[0] if isinstance(d, list) else d; print($1)"; }
# Waits until a file has this many lines.
lines() {
    for _ in $(seq 1 200); do
        [ "$(wc -l <"$1")" -ge "$2" ] && return 0
        sleep 0.05
    done
    printf 'only %s of %s lines in %s\n' "$(wc -l <"$1")" "$2" "$1" >&2
    exit 1
}

same "$(ctl put "$run/a" 1)" OK
same "$(ctl get "$run/a" --print-value-only)" 1
same "$(ctl put "$run/a" 2 --prev-kv | tr '\n' ,)" "OK,$run/a,1,"
ctl put "$run/b" x >/dev/null
ctl put "$run/c" y >/dev/null
same "$(ctl get "$run/" --prefix --keys-only | grep . | tr '\n' ,)" "$run/a,$run/b,$run/c,"
same "$(ctl get "$run/" --prefix --limit=2 --order=DESCEND --sort-by=KEY --print-value-only | tr '\n' ,)" "y,x,"
same "$(ctl get "$run/a" "$run/c" --print-value-only | tr '\n' ,)" "2,x,"
same "$(ctl get "$run/" --prefix --limit=1 --write-out=fields | grep '"Count"')" '"Count" : 3'
revision=$(ctl get "$run/a" -w json | field "d['header']['revision']")
ctl put "$run/a" 3 >/dev/null
same "$(ctl get "$run/a" --rev="$revision" --print-value-only)" 2
same "$(ctl get "$run/a" --consistency=s --print-value-only)" 3
same "$(ctl del "$run/b" --prev-kv | tr '\n' ,)" "1,$run/b,x,"
same "$(ctl del "$run/" --prefix)" 2
ok get, put, del

ctl put "$run/t" old >/dev/null
same "$(printf 'value("%s/t") = "old"\nversion("%s/t") = "1"\n\nput %s/t new\nget %s/t\n\nput %s/t never\n\n' \
    "$run" "$run" "$run" "$run" "$run" | ctl txn | tr '\n' ,)" "SUCCESS,,OK,,$run/t,new,"
same "$(printf 'mod("%s/none") > "0"\n\nput %s/t never\n\nget %s/t\ndel %s/t\n\n' "$run" "$run" "$run" "$run" |
    ctl txn | tr '\n' ,)" "FAILURE,,$run/t,new,,1,"
ok txn

timeout 60 "$etcdctl" --endpoints="$endpoints" watch "$run/w/" --prefix --prev-kv >"$home/watch" &
revision=$(ctl put "$run/before" x -w json | field "d['header']['revision']")
for i in $(seq 1 200); do # the watcher may be on its way still
    ctl put "$run/w/k" "$i" >/dev/null
    [ -s "$home/watch" ] && break
done
ctl del "$run/w/k" >/dev/null
for _ in $(seq 1 200); do
    grep -q DELETE "$home/watch" && break
    sleep 0.05
done
same "$(tail -5 "$home/watch" | head -1)" DELETE
timeout 60 "$etcdctl" --endpoints="$endpoints" watch "$run/w/" --prefix --rev="$revision" >"$home/replay" &
lines "$home/replay" 3
same "$(head -3 "$home/replay" | tr '\n' ,)" "PUT,$run/w/k,1,"
ok watch

lease=$(ctl lease grant 60 | awk '{print $2}')
ctl put "$run/leased" x --lease="$lease" >/dev/null
ctl lease timetolive "$lease" --keys | grep -q "granted with TTL(60s), remaining(.*attached keys(\[$run/leased\])"
ctl lease keep-alive "$lease" --once | grep -q "keepalived with TTL(60)"
ctl lease list | grep -q "$lease"
ctl lease revoke "$lease" | grep -q revoked
same "$(ctl get "$run/leased")" ""
ctl lease timetolive "$lease" | grep -q "already expired"
ok lease

same "$(ctl lock "$run/lock" echo held)" held
timeout 60 "$etcdctl" --endpoints="$endpoints" lock "$run/lock" >"$home/first" &
holder=$!
lines "$home/first" 1
timeout 60 "$etcdctl" --endpoints="$endpoints" lock "$run/lock" >"$home/second" &
sleep 1
same "$(cat "$home/second")" ""
kill -INT "$holder"
lines "$home/second" 1
ok lock

timeout 60 "$etcdctl" --endpoints="$endpoints" elect "$run/election" one >"$home/one" &
leader=$!
lines "$home/one" 2
timeout 60 "$etcdctl" --endpoints="$endpoints" elect "$run/election" two >"$home/two" &
timeout 60 "$etcdctl" --endpoints="$endpoints" elect -l "$run/election" >"$home/listen" &
lines "$home/listen" 2
same "$(sed -n 2p "$home/listen")" one
kill -INT "$leader"
lines "$home/two" 2
lines "$home/listen" 4
same "$(sed -n 4p "$home/listen")" two
ok elect

members=$(ctl member list | wc -l)
same "$members" "$(tr ',' '\n' <<<"$endpoints" | wc -l)"
ctl member list -w json | field "d['members'][0]['clientURLs'][0]" | grep -q http
ctl endpoint health 2>&1 | grep -c "is healthy" | grep -qx "$members"
ctl endpoint health --cluster >/dev/null 2>&1
same "$(ctl endpoint status -w json | python3 -c 'import json,sys; print(len({e["Status"]["leader"] for e in json.load(sys.stdin)}))')" 1
ctl endpoint hashkv >/dev/null
ok member, endpoint

same "$(ctl alarm list)" ""
for endpoint in ${endpoints//,/ }; do timeout 60 "$etcdctl" --endpoints="$endpoint" defrag >/dev/null; done
revision=$(ctl put "$run/compact" x -w json | field "d['header']['revision']")
ctl compaction "$revision" | grep -q "compacted revision $revision"
if ctl get "$run/compact" --rev=1 2>"$home/error"; then exit 1; fi
grep -q "required revision has been compacted" "$home/error"
ok alarm, defrag, compaction

timeout 60 "$etcdctl" --endpoints="${endpoints%%,*}" snapshot save "$home/snapshot" >/dev/null 2>&1
python3 -c 'import hashlib,sys; d=open(sys.argv[1], "rb").read(); assert hashlib.sha256(d[:-32]).digest() == d[-32:]' "$home/snapshot"
ok snapshot save

ctl check perf --load=s >"$home/perf" 2>&1 || true # the verdict is about the machine; that it ends is about us
grep -q "Throughput" "$home/perf" || { tail -5 "$home/perf" >&2; exit 1; }
ok check perf

if [ "$members" -gt 1 ]; then
    leader=$(ctl endpoint status -w json | python3 -c '
import json,sys
for e in json.load(sys.stdin):
    if e["Status"]["header"]["member_id"] == e["Status"]["leader"]: print(e["Endpoint"])')
    other=$(ctl endpoint status -w json | python3 -c '
import json,sys
print([hex(e["Status"]["header"]["member_id"])[2:] for e in json.load(sys.stdin) if e["Status"]["header"]["member_id"] != e["Status"]["leader"]][0])')
    timeout 60 "$etcdctl" --endpoints="$leader" move-leader "$other" | grep -q "transferred"
    same "$(ctl put "$run/moved" x)" OK
    ok move-leader
fi

timeout 60 "$etcdctl" snapshot status "$home/snapshot" -w json >"$home/status" 2>"$home/error" ||
    { cat "$home/error" >&2; exit 1; }
[ "$(field "d['totalKey']" <"$home/status")" -ge 1 ]
ok snapshot status
