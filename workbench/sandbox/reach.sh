# As root, in a mount namespace of its own: make what lies where only root may look reachable for the user that programs run as.
# $1 an empty folder, $2 the paths to reach and $3 the folders that close them, a path a line; then the command.
# Each of these folders then holds nothing but the paths, for everyone in this namespace.
set -euf
root=$1 paths=$2 closing=$3
shift 3
mount -t tmpfs -o mode=755 open "$root"
IFS='
'
for path in $paths; do
  if [ -d "$path" ]; then
    mkdir -p "$root$path"
  else
    mkdir -p "$root${path%/*}"
    : >"$root$path"
  fi
  mount --rbind "$path" "$root$path"
done
for folder in $closing; do
  mount --rbind "$root$folder" "$folder"
done
unset IFS
exec "$@"
