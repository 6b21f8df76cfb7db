#!/bin/bash
# examples/launch.sh TORCHRUN-ARGUMENTS
#
# Starts torchrun, and passes SIGUSR1 and SIGTERM to its ranks alone. The ranks then take the time that they
# need to save; torchrun itself would give them 30 seconds. Ends with torchrun's exit code.
#
# The variable is for nodes that come back: without it a running torchrun does not tell a new one (torch
# 2.13) where the ranks meet, and after 60 seconds both fail.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
(trap '' USR1; exec torchrun "$@") &
trap 'pkill -USR1 -P $!' USR1 TERM
wait $!
code=$?
if [ $code -gt 128 ]; then # a signal cut the waiting short
    wait $!
    code=$?
fi
(exit $code)
