#!/usr/bin/env bash
# vllm-router (pip install vllm-router==0.1.17, in an environment of its own) in front of servers of gfdit:
#   run.sh http://10.0.0.1:8000 http://10.0.0.2:8000
# It knows the open requests of each, not the work. PORT and an --api-key are options behind the addresses.
set -euo pipefail
urls=() options=()
while (($#)) && [[ $1 == http* ]]; do urls+=("$1"); shift; done
options=("$@")
exec "${VLLM_ROUTER:-vllm-router}" --host 0.0.0.0 --port 8080 --worker-urls "${urls[@]}" --policy power_of_two \
    --health-check-endpoint /v1/gfdit/ready --health-check-interval-secs 1 --health-check-timeout-secs 5 \
    --health-failure-threshold 2 --health-success-threshold 1 \
    --retry-max-retries 10 --retry-initial-backoff-ms 200 --retry-max-backoff-ms 2000 \
    --request-timeout-secs 1800 --worker-startup-timeout-secs 1800 "${options[@]}"
