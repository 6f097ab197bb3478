# Inside fresh user, mount and pid namespaces: build the small world in $1 and move into it.
# $1 an empty folder, $2 the box, $3 the size of /tmp, $4 what to show read-only and $5 which folders in it as empty ones, a
# path a line; then the command.
set -euf
PATH=/usr/sbin:/usr/bin:/sbin:/bin
root=$1 box=$2 size=$3 shown=$4 hidden=$5
shift 5
mount -t tmpfs -o "$size,mode=755" sandbox "$root"
cd "$root"
mkdir box tmp proc dev
mount -t tmpfs -o "$size,mode=1777" tmp tmp # first: what is shown may lie in /tmp
IFS='
'
for path in $shown; do
  if [ -L "$path" ]; then
    ln -s "$(readlink "$path")" ".$path"
    continue
  elif [ -d "$path" ]; then
    mkdir -p ".$path"
  else
    mkdir -p ".${path%/*}"
    : >".$path"
  fi
  mount --rbind "$path" ".$path"
  mount -o remount,bind,ro ".$path"
done
for folder in $hidden; do
  mount -t tmpfs -o ro,mode=755 hidden ".$folder"
done
unset IFS
mount --bind "$box" box
mount -t proc proc proc
echo 0 >proc/sys/user/max_user_namespaces # no namespaces inside this one
mount -o bind,ro proc/sys proc/sys
for name in null zero full random urandom; do
  : >"dev/$name"
  mount --bind "/dev/$name" "dev/$name"
done
cp -P /dev/fd /dev/stdin /dev/stdout /dev/stderr dev 2>/dev/null || : # links, where the machine has them
ln -s /tmp dev/shm
mount -o "remount,ro,$size" sandbox "$root"
pivot_root . .
umount -l .
cd /box
# not exec: this shell stays the world's first process, and ends with its starter whatever the program does
exec 8>&2 2>/dev/null # nothing but the program's own words
(exec "$@" 2>&8 8>&-) || exit $?
exit 0
