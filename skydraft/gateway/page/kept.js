// The newest conversations, saved only in this browser.

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

/** Calls `work` with the stores in one transaction, and returns the result of its last request. */
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

/** The saved conversations, newest first. */
export async function allHeads() {
  const found = await inStores('readonly', (heads) => heads.getAll());
  return found.sort((one, other) => other.changed - one.changed);
}

export const turnsOf = async (id) => JSON.parse(await inStores('readonly', (_, turns) => turns.get(id)));

/** Saves a conversation under its id, or under a new one if another tab has changed it meanwhile. */
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
