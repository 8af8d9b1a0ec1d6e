#!/usr/bin/env bash
# A real S3 server for benchmarks and tests: Ceph's RADOS gateway over one monitor and one in-memory OSD, on loopback,
# unless S3 is to listen at another ADDRESS.
#
#   benchmarks/harness/ceph.sh start FOLDER MON_PORT S3_PORT [OWNER [ADDRESS]]    keys: tbakey, tbasecret
#   benchmarks/harness/ceph.sh stop FOLDER
#
# Once the process OWNER has ended, however it did, the server stops by itself.
#
# On Debian: apt-get install --no-install-recommends ceph-mon ceph-osd radosgw
set -euo pipefail

write_settings() { # everything this cluster knows lies in its folder
  cat > "$folder/ceph.conf" <<SETTINGS
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon host = v1:127.0.0.1:$mon_port
# From here every daemon knows the cluster's id before it first speaks; one that asks the monitor may speak too early.
monmap = $folder/monmap
public addr = 127.0.0.1
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
keyring = $folder/keyring
run dir = $folder
admin socket = $folder/\$name.asok
pid file = $folder/\$name.pid
log file = $folder/\$name.log
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon max pg per osd = 1000
mon allow pool size one = true
mon warn on pool no redundancy = false
mon data = $folder/mon
# A cluster of one need not wait for others before it agrees with itself.
paxos propose interval = 0.02
paxos min wait = 0.01
osd data = $folder/osd
osd objectstore = memstore
memstore device bytes = 2147483648
osd memory target = 939524096
osd class load list = *
osd class default list = *
[client.rgw]
rgw data = $folder/rgw
rgw frontends = beast endpoint=$address:$s3_port
rgw thread pool size = 32
SETTINGS
}

until_true() { # WHAT COMMAND…: up to a minute
  local what=$1
  shift
  for _ in $(seq 600); do
    if "$@"; then return; fi
    sleep 0.1
  done
  echo "$what did not come up within a minute; see the logs in $folder" >&2
  return 1
}

osd_is_up() { timeout 20 ceph osd stat 2> /dev/null | grep -q '1 up'; }
gateway_answers() { (exec 3<> "/dev/tcp/$address/$s3_port") 2> /dev/null; }

start() {
  mkdir "$folder" "$folder"/{mon,osd,rgw}
  write_settings
  export CEPH_CONF=$folder/ceph.conf CEPH_ARGS=--no-mon-config
  ceph-authtool "$folder/keyring" --create-keyring --gen-key -n mon. --cap mon 'allow *'
  ceph-authtool "$folder/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *'
  monmaptool "$folder/monmap" --create --fsid "$(ceph-conf --lookup fsid)" --addv a "[v1:127.0.0.1:$mon_port]"
  ceph-mon -i a --mkfs --monmap "$folder/monmap" --keyring "$folder/keyring"
  ceph-mon -i a
  local osd
  osd=$(cat /proc/sys/kernel/random/uuid)
  until_true "the monitor" timeout 20 ceph osd new "$osd" # `ceph` itself does ask, so it may need a second try
  ceph-osd -i 0 --mkfs --osd-uuid "$osd"
  ceph-osd -i 0
  until_true "the OSD" osd_is_up
  timeout 90 radosgw-admin -n client.rgw user create \
    --uid=tba --display-name=tba --access-key=tbakey --secret-key=tbasecret
  radosgw -n client.rgw
  until_true "the gateway" gateway_answers
}

stop() { # by the ids that the daemons themselves wrote; they hold nothing that is worth a slow end
  for file in "$folder"/*.pid; do
    if [ -e "$file" ]; then kill -KILL "$(cat "$file")" 2> /dev/null || true; fi
    rm -f "$file"
  done
}

stop_after() {
  while kill -0 "$1" 2> /dev/null; do sleep 2; done
  stop
}

usage="usage: ceph.sh start FOLDER MON_PORT S3_PORT [OWNER [ADDRESS]] | ceph.sh stop FOLDER"
folder=${2:?$usage}
case $1 in
  start)
    mon_port=${3:?$usage} s3_port=${4:?$usage} address=${6:-127.0.0.1}
    start
    if [ -n "${5:-}" ]; then
      setsid "$0" stop-after "$folder" "$5" < /dev/null > /dev/null 2>&1 &
    fi
    ;;
  stop-after) stop_after "${3:?$usage}" ;;
  stop) stop ;;
  *)
    echo "$usage" >&2
    exit 2
    ;;
esac
