#!/bin/sh
# Makes a virtual environment at $1 with everything requirements.lock pins, without root.
set -eu
venv=$1

python=
for candidate in "${PYTHON:-}" python3 python3.12 python3.11; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
        2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "setup: Python 3.11 or 3.12 is needed; none found (set PYTHON=/path/to/python3.11)" >&2
    exit 2
fi

if [ ! -x "$venv/bin/python" ]; then
    # Debian ships Python without ensurepip. virtualenv brings its own pip, and a pip that is
    # installed for the whole machine can put one into an environment.
    if ! "$python" -m venv "$venv" >/dev/null 2>&1; then
        rm -rf "$venv"
        if ! "$python" -m virtualenv -q "$venv" 2>/dev/null; then
            rm -rf "$venv"
            if ! { "$python" -m venv --without-pip "$venv" &&
                "$python" -m pip --python "$venv/bin/python" install --quiet pip; } 2>/dev/null; then
                rm -rf "$venv"
                echo "setup: $python has neither venv (Debian: python3-venv), nor virtualenv, nor" \
                    "pip; one of them is needed to install anything" >&2
                exit 2
            fi
        fi
    fi
fi

# pip warns of what a reader can do nothing about (a wheel folder that is configured and missing, running
# as root, a newer pip). Its errors, and whatever else it says, are shown.
quietly_install() {
    warnings=$venv/.pip-stderr
    status=0
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2>"$warnings" || status=$?
    grep -vE '^(WARNING|DEPRECATION|Looking in (indexes|links)|\[notice\])|^ *$' "$warnings" >&2 || true
    if [ "$status" -ne 0 ]; then
        grep -E '^(WARNING|DEPRECATION)' "$warnings" >&2 || true  # they may say why
    fi
    rm -f "$warnings"
    return "$status"
}

echo "setup: installing what requirements.lock pins into $venv (a few minutes the first time)"
quietly_install --require-hashes -r requirements.lock
# torch's version is pinned but not its file: which build is right (CPU, CUDA) depends on the machine.
# What the CPU build depends on is in the lock.
quietly_install torch==2.13.0
# The project itself, editable; its build tools are pinned with the rest.
quietly_install --no-deps --no-build-isolation --editable .
echo "setup: done"
