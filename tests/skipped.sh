#!/bin/sh
# Runs at the end of `make test`: lists and counts the tests that could not run on this machine.
set -eu
list=${POSTRIDER_TEST_SKIPPED:?}
if [ -s "$list" ]; then
    echo
    cat "$list"
    echo "$(wc -l <"$list") tests were SKIPPED on this machine: what they cover was not tested here."
else
    echo "0 tests were skipped."
fi
