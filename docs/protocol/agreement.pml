/* The edge agreement of gfdit/comm/agreement.py among three ranks, with groups that overlap.
 *
 * A program is a sequence of OPERATIONS operations, any of: a two-way collective of one of the four groups with two
 * ranks or more, a send between any ordered pair, a broadcast from any rank to the other two. SPIN chooses every
 * program; all ranks follow it in its order, each issuing those that it takes part in (the order that the runtime
 * guarantees). It then explores every interleaving of their steps.
 *
 * Memory is weak: a payload store is in flight until Memory delivers it, at any time; publishing (release) waits
 * until the rank's own stores have arrived, and only then stores the token. Reading a payload is a step of its own,
 * so an overwrite between observing and reading is seen.
 *
 * Properties: no deadlock (invalid end state), no payload overwritten before it was read or read before it
 * arrived, no token of a later instance in a slot that is waited on (assertions).
 *
 * OPERATIONS and FEW (fewer kinds) set the size. Mutants, by -D: ONE_SLOT, NO_CREDIT, NO_RELEASE, REUSED_TOKEN, NO_WAIT.
 */
#define RANKS 3
#ifndef OPERATIONS
#define OPERATIONS 3
#endif
#ifdef ONE_SLOT
#define SLOT(n) 0
#else
#define SLOT(n) ((n) % 2)
#endif
#ifdef REUSED_TOKEN
#define TOKEN(n) 1
#else
#define TOKEN(n) (n)
#endif

#define EDGE(source, destination) ((source) * RANKS + (destination))
#define CELL(source, destination, n) (EDGE(source, destination) * 2 + SLOT(n))

/* Kinds: below 4 two-way, the members of group 0..3; then sends; then broadcasts. */
#define IS_TWO_WAY(kind) ((kind) < 4)
#define KINDS 13

byte program[OPERATIONS];
byte token[RANKS * RANKS * 2];
byte payload[RANKS * RANKS * 2];
byte flight[RANKS * RANKS];  /* the instance whose payload is on its way, 0: none */
byte credit[RANKS * RANKS];  /* how many instances of the edge its receiver has consumed */

/* Bit masks of senders and receivers of each kind. */
inline look_up(kind, senders, receivers) {
    if
    :: kind == 0 -> senders = 3; receivers = 3
    :: kind == 1 -> senders = 5; receivers = 5
    :: kind == 2 -> senders = 6; receivers = 6
    :: kind == 3 -> senders = 7; receivers = 7
    :: kind == 4 -> senders = 1; receivers = 2
    :: kind == 5 -> senders = 1; receivers = 4
    :: kind == 6 -> senders = 2; receivers = 1
    :: kind == 7 -> senders = 2; receivers = 4
    :: kind == 8 -> senders = 4; receivers = 1
    :: kind == 9 -> senders = 4; receivers = 2
    :: kind == 10 -> senders = 1; receivers = 6
    :: kind == 11 -> senders = 2; receivers = 5
    :: kind == 12 -> senders = 4; receivers = 3
    fi
}

/* The first operation up to a renaming of the ranks. */
inline choose_first(kind) {
    if
    :: kind = 0
    :: kind = 3
    :: kind = 4
    :: kind = 10
    fi
}

/* FEW: two overlapping pairs, all three, and both directions of one send; for longer programs. */
inline choose(kind) {
#ifdef FEW
    if
    :: kind = 0
    :: kind = 2
    :: kind = 3
    :: kind = 4
    :: kind = 6
    fi
#else
    select (kind : 0 .. KINDS - 1)
#endif
}

#define MINE (1 << me)
#define HIS (1 << peer)
#define ARRIVED (flight[EDGE(me, 0)] == 0 && flight[EDGE(me, 1)] == 0 && flight[EDGE(me, 2)] == 0)

proctype Rank(byte me) {
    byte step = 0, peer = 0, senders, receivers, n;
    byte published[RANKS], observed[RANKS], consumed[RANKS];
    do
    :: step == OPERATIONS -> break
    :: step < OPERATIONS ->
        d_step { look_up(program[step], senders, receivers); peer = 0 }
        /* Publish to all peers before waiting for any. */
        do
        :: peer == RANKS -> break
        :: peer < RANKS && peer != me && (senders & MINE) && (receivers & HIS) ->
#ifndef NO_CREDIT
            /* Instance n overwrites the slot of n - 2, so that one must be known to be consumed. */
            if
            :: published[peer] <= consumed[peer] + 1 -> skip
            :: else ->
                credit[EDGE(me, peer)] + 1 >= published[peer];
                consumed[peer] = published[peer] - 1
            fi;
#endif
            atomic {
                flight[EDGE(me, peer)] == 0;
                published[peer]++;
                flight[EDGE(me, peer)] = published[peer]
            }
#ifndef NO_RELEASE
            ARRIVED;
#endif
            token[CELL(me, peer, published[peer])] = TOKEN(published[peer]);
            peer++
        :: else -> peer++
        od;
        peer = 0;
        do
        :: peer == RANKS -> break
        :: peer < RANKS && peer != me && (receivers & MINE) && (senders & HIS) ->
            n = observed[peer] + 1;
#ifndef NO_WAIT
            token[CELL(peer, me, n)] >= TOKEN(n);
            assert(token[CELL(peer, me, n)] == TOKEN(n));
#endif
            assert(payload[CELL(peer, me, n)] == n);
            observed[peer] = n;
            if
            :: IS_TWO_WAY(program[step]) ->
                if
                :: published[peer] - 1 > consumed[peer] -> consumed[peer] = published[peer] - 1
                :: else -> skip
                fi
            :: else ->
                credit[EDGE(peer, me)] = n;
                consumed[peer] = published[peer]
            fi;
            peer++
        :: else -> peer++
        od;
        step++; n = 0
    od
}

/* Delivers payload stores, in any order among edges. */
proctype Memory() {
    byte edge = 0;
end:
    do
    :: atomic {
        if
        :: flight[1] -> edge = 1
        :: flight[2] -> edge = 2
        :: flight[3] -> edge = 3
        :: flight[5] -> edge = 5
        :: flight[6] -> edge = 6
        :: flight[7] -> edge = 7
        fi;
        payload[edge * 2 + SLOT(flight[edge])] = flight[edge];
        flight[edge] = 0;
        edge = 0
    }
    od
}

init {
    byte position = 0, kind = 0;
    do
    :: position == OPERATIONS -> break
    :: position < OPERATIONS ->
        if
        :: position == 0 -> choose_first(kind)
        :: else -> choose(kind)
        fi;
        program[position] = kind;
        position++
    od;
    atomic { run Memory(); run Rank(0); run Rank(1); run Rank(2) }
}
