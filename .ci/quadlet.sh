#!/usr/bin/env bash
# Takes podman's quadlet, one program that needs glibc alone, out of Debian 13's package: Debian 12's podman has none.
#
#     bash .ci/quadlet.sh FOLDER        on Debian with its package index; changes nothing of the system
set -eu
folder=$(realpath -m "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" >"$work/sources.list"
options=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
cd "$work"
timeout 120 apt-get "${options[@]}" update
timeout 120 apt-get "${options[@]}" download podman
dpkg-deb -x podman_*.deb "$work/unpacked"
mkdir -p "$folder"
cp "$work/unpacked/usr/libexec/podman/quadlet" "$folder/quadlet"
