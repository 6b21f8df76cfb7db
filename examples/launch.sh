#!/bin/bash
# examples/launch.sh TORCHRUN-ARGUMENTS
#
# torchrun, whose ranks alone hear of SIGUSR1 and SIGTERM, and then take the time they need to save:
# from torchrun itself they would get 30 seconds. Ends as torchrun does.
#
# A node may come back: without the variable a torchrun that stays does not tell a new one (torch 2.13)
# where the ranks meet, and after 60 seconds both fail.
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
