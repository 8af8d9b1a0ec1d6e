#!/bin/bash
# A trainer on two nodes with eight GPUs each, for a run whose supervisor does not start it (--external-trainer):
#
#   sbatch docs/slurm/trainer.sh s3://bucket/tba/runs/RUN
#
# Submit this again to resume, with any number of nodes. If the name of the first node has no address that other nodes
# can reach, as on Debian, set GLOO_SOCKET_IFNAME to a network interface before you submit this.
#SBATCH --job-name=tba-trainer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --no-requeue
#SBATCH --signal=TERM@300
# The last line gives rank 0 five minutes before the end of the job's time, to stop with a checkpoint.

# Each task starts the ranks of its node, one for each GPU. If one of them fails, the others end by themselves, and say
# why, so srun must not kill them at once. srun does not take over --cpus-per-task by itself.
exec srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c \
  'exec python -P -m flows.roles.node "$0" --nodes "$SLURM_NNODES" --node "$SLURM_NODEID"' "$1"
