#!/bin/sh
# Consume a topic over REST with nothing but sh, curl and sed.
#
#   RMQ_URL=http://127.0.0.1:8000/api/rmq RMQ_TOKEN=... sh consume.sh TOPIC [COUNT] [COMMAND ...]
#
# Runs COMMAND with each body as its last argument (default: prints the body), one message at a time; exit 0 commits,
# anything else is tried again. Ends after COUNT messages (default: never). COMMAND has to be done well within the
# topic's time-out; consume.mjs shows how to extend it.
set -eu

topic=$1 count=${2:-0}
shift; [ $# -eq 0 ] || shift
consumer=$(cat /proc/sys/kernel/random/uuid 2>/dev/null || uuidgen)

# post VERB REQUEST: puts what is answered into `answer`. Ends where it helps nobody to say it again, as with a wrong token; else waits
# as long as the server asks for, and fails.
post() {
  status='' pause=''
  if ! got=$(curl --silent --show-error --include --max-time 40 --request POST \
    --header "Authorization: Token $RMQ_TOKEN" --header 'Content-Type: application/json' \
    --data "$2" "$RMQ_URL/v1/topics/$topic/$1/"); then
    sleep 2
    return 1
  fi
  status=$(printf %s "$got" | sed -n '1s/^[^ ]* \([0-9]*\).*/\1/p')
  pause=$(printf %s "$got" | sed -n 's/^[Rr]etry-[Aa]fter: *\([0-9]*\).*/\1/p')
  answer=$(printf %s "$got" | sed -n '$p')
  case $status in 2*) return 0 ;; esac
  echo "$1: $status $answer" >&2
  case $status$body in 429* | 5* | '409"held":true') ;; *) [ -n "$pause" ] || exit 1 ;; esac
  sleep "${pause:-2}"
  return 1
}

done=0 body='"wait":20'
while [ "$count" -eq 0 ] || [ "$done" -lt "$count" ]; do
  if ! post prepare "{\"consumer\":\"$consumer\",$body}"; then
    # Nobody knows what was handed out: ask that first when the server is back. With SERIAL False it does not know
    # either (409), and what was handed out comes again when it times out.
    case $status$pause in 409) body='"wait":20' ;; *) body='"held":true' ;; esac
    continue
  fi
  body='"wait":20'
  # Ours are the first fields of a message; what follows is the sender's.
  id=$(printf %s "$answer" | sed -n 's/^{"messages":\[{"id":"\([^"]*\)".*/\1/p')
  # Nothing came. Where too many wait already, the server answers at once and says when to ask again.
  [ -n "$id" ] || { sleep "${pause:-0}"; continue; }
  receipt=$(printf %s "$answer" | sed -n 's/^{"messages":\[{"id":"[^"]*","slot":[0-9]*,"receipt":"\([^"]*\)".*/\1/p')
  message=$(printf %s "$answer" | sed -e 's/^{"messages":\[{[^{]*"body"://' -e 's/,"encoding":"[a-z0-9]*","key":.*$//')
  if [ $# -gt 0 ]; then verdict=commit; "$@" "$message" || verdict=rollback; else verdict=commit; printf '%s\n' "$message"; fi
  # A lost answer is asked for again: of what was settled by then it says "stale".
  until post "$verdict" "{\"deliveries\":[{\"id\":\"$id\",\"receipt\":\"$receipt\"}]}"; do :; done
  done=$((done + 1))
done
