// Conversations that this browser keeps, the newest of them; nothing of them is on the server.

const MOST = 100;
const STORES = ['heads', 'turns']; // {id, title, changed} to list, and the turns of each as JSON

let opening = null;

export const newId = () => `${Date.now()}-${Math.random()}`;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open('skydraft', 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore('heads', { keyPath: 'id' });
      request.result.createObjectStore('turns');
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

/** Does `work` on the stores in one transaction, and returns the result of the request that it made last. */
async function inStores(mode, work) {
  const open = await database();
  return new Promise((resolve, reject) => {
    const transaction = open.transaction(STORES, mode);
    const request = work(...STORES.map((name) => transaction.objectStore(name)));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

export const headOf = (id) => inStores('readonly', (heads) => heads.get(id));

/** What is kept, newest first. */
export async function allHeads() {
  const found = await inStores('readonly', (heads) => heads.getAll());
  return found.sort((one, other) => other.changed - one.changed);
}

export const turnsOf = async (id) => JSON.parse(await inStores('readonly', (_, turns) => turns.get(id)));

/** Keeps a conversation's turns under its id; under a new one if another tab went on with it meanwhile. */
export async function keep(head, turns) {
  const before = await headOf(head.id);
  if (before && before.changed !== head.changed) head.id = newId();
  head.changed = Date.now();
  await inStores('readwrite', (heads, texts) => {
    texts.put(JSON.stringify(turns), head.id);
    return heads.put(head);
  });
  for (const { id } of (await allHeads()).slice(MOST)) await forget(id);
}

export const forget = (id) => inStores('readwrite', (heads, turns) => {
  turns.delete(id);
  return heads.delete(id);
});
