#!/bin/bash
# examples/launch.sh TORCHRUN-ARGUMENTS
#
# torchrun, whose ranks alone hear of SIGUSR1 and SIGTERM, and then take the time they need to save:
# from torchrun itself they would get 30 seconds. Ends as torchrun does.
(trap '' USR1; exec torchrun "$@") &
trap 'pkill -USR1 -P $!' USR1 TERM
wait $!
code=$?
if [ $code -gt 128 ]; then # a signal cut the waiting short
    wait $!
    code=$?
fi
(exit $code)
