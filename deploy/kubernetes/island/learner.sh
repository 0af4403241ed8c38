#!/bin/sh
# A process of a learner of several hosts, in a pod of an indexed Job. Its exit code says whether the Job is to replace the pod:
# 0 is the end of the run, 143 that the processes left with notice, all others are the learner's own.
set -u

begun=${BEGUN:-/tmp/begun} leaving=$DILOCO_STATE_DIR/$DILOCO_NAME.leaving
asked='' interrupted=''
trap 'exit 143' TERM
touch "$begun"
until getent hosts "${LEADER%:*}" >/dev/null; do sleep 1; done  # a pod's name is known some time after the pod has begun

diloco-learner &
learner=$!
# notice to one process is notice to all: the others end with 0 without having been asked, as at the end of the run
trap 'asked=yes interrupted=yes; touch "$leaving"; kill -TERM "$learner"' TERM
while interrupted='' && wait "$learner"; code=$?; [ "$interrupted" ]; do :; done  # a signal ends `wait`, and not the learner

if [ "$asked" ] || { [ "$code" -eq 0 ] && [ "$leaving" -nt "$begun" ]; }; then exit 143; fi
exit "$code"
