#!/bin/sh
# Makes the two pictures of README.md: docs/images/gallery.png and frontier.png. About ten minutes on one core.
# Usage: docs/generate/pictures.sh FOLDER    FOLDER: where the runs go; pflsec must be on the PATH.
set -eu
images=$(cd "$(dirname "$0")/../images" && pwd)
mkdir -p "$1"
cd "$1"

# The run of `make demo`.
pflsec train --algo fedrep --rounds 10 --capture-rounds last --capture-clients 0,1,2,3 --victims 1 --name demo --runs-dir gallery
pflsec attack ig demo --iterations 400 --restarts 1 --set precision=float32 --runs-dir gallery
cp gallery/demo/attacks/inverting-gradients-*/gallery.png "$images/gallery.png"

for method in local fedavg fedrep fedper ditto fedproto; do
    pflsec train --algo $method --rounds 10 --capture-rounds last --victims 1 --name $method --runs-dir frontier
done
pflsec train --algo fedavg --defense dp-sgd:epsilon=30 --rounds 10 --capture-rounds last --victims 1 \
    --name fedavg-epsilon-30 --runs-dir frontier
for run in fedavg fedrep fedper ditto fedproto fedavg-epsilon-30; do
    pflsec attack ig $run --iterations 400 --restarts 1 --set precision=float32 --runs-dir frontier
done
pflsec frontier --runs-dir frontier
cp frontier/frontier/frontier.png "$images/frontier.png"
