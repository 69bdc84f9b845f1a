#!/bin/sh
# What SGLang compiles its page-hash extension with, and the libraries of the remote tier.
# Installed when something is missing and we may; otherwise named.
set -eu

packages="g++ ninja-build libssl-dev libibverbs1 libnuma1 libcurl4 libnl-3-200 libnl-route-3-200 etcd-server"

missing=""
if command -v dpkg-query >/dev/null 2>&1; then
    for package in $packages; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
    done
else
    for tool in g++ ninja; do
        command -v $tool >/dev/null 2>&1 || missing="$missing $tool"
    done
fi
[ -n "$missing" ] || exit 0

if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    echo "installing system packages:$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $missing >/dev/null || echo "some could not be installed; going on"
else
    echo "not installed, please install them:$missing"
fi
command -v g++ >/dev/null 2>&1 || { echo "g++ is needed to build SGLang's page-hash extension"; exit 1; }
